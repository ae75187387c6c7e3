"""Images are known again by what their files hold, wherever they lie."""

import hashlib
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mapet_mm.structures import image_files
from mapet_mm.structures.image_files import file_digests, require_same_files
from mapet_mm.tokenizers.features import folder_of
from mapet_mm.utils.errors import UserError


def write_images(folder: Path, count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    names = [f"class {index % 2}/{index:03d}.png" for index in range(count)]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(256, size=(5, 4, 3), dtype=np.uint8)).save(folder / name)
    return names


def test_of_many_images_64_have_digests_whatever_their_order(tmp_path):
    names = write_images(tmp_path, 100)
    digests = file_digests(tmp_path, names)
    assert len(digests) == 64
    assert file_digests(tmp_path, reversed(names)) == digests
    name = next(iter(digests))
    assert digests[name] == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    for kind in ("class 0", "class 1"):
        assert sum(name.startswith(kind) for name in digests) > 16


def test_an_image_may_be_repaired_and_what_is_no_file_here_has_no_digest(tmp_path):
    names = write_images(tmp_path, 3)
    whole = (tmp_path / names[0]).read_bytes()
    for broken in (b"", b"<html>", whole[:20]):
        (tmp_path / names[0]).write_bytes(broken)
        digests = file_digests(tmp_path, names)
        assert set(digests) == set(names[1:])
    (tmp_path / names[0]).write_bytes(whole)
    assert require_same_files(digests, tmp_path, "this", "do that")
    assert file_digests(tmp_path / "elsewhere", names) == file_digests(None, names) == {}
    assert file_digests("s3://bucket/images", names) == {}


def test_images_are_the_same_elsewhere_unless_one_has_another_content(tmp_path):
    names = write_images(tmp_path / "here", 5)
    digests = file_digests(tmp_path / "here", names)
    shutil.move(tmp_path / "here", tmp_path / "there")
    write_images(tmp_path / "there/more", 2)
    (tmp_path / "there" / names[1]).unlink()  # that is another's question
    assert require_same_files(digests, tmp_path / "there", "this", "do that")
    assert not require_same_files(digests, tmp_path / "here", "this", "do that")
    assert not require_same_files(None, tmp_path / "there", "this", "do that")
    shutil.copy(tmp_path / "there" / names[2], tmp_path / "there" / names[0])
    with pytest.raises(
        UserError, match=rf"this was made of another image `{names[0]}` than .*there/{names[0]}: do that"
    ):
        require_same_files(digests, tmp_path / "there", "this", "do that")


def test_images_in_tar_files_are_known_by_what_they_hold(tmp_path, monkeypatch):
    names = write_images(tmp_path / "images", 6)

    def pack(number: int, packed: list[str]) -> None:
        with tarfile.open(tmp_path / f"{number}.tar", "w") as file:
            for name in packed:
                file.add(tmp_path / "images" / name, f"./{name}")

    pack(0, names[:3])
    pack(1, names[3:])
    in_tar = [f"{index // 3}.tar/{name}" for index, name in enumerate(names)]
    digests = file_digests(tmp_path, in_tar)
    assert sorted(digests.values()) == sorted(file_digests(tmp_path / "images", names).values())
    pack(1, [names[0], *names[3:]])  # one is added
    assert require_same_files(digests, tmp_path, "this", "do that")
    with tarfile.open(tmp_path / "1.tar", "a") as file:  # of members of one name the first counts
        file.add(tmp_path / "images" / names[0], f"./{names[3]}")
    assert require_same_files(digests, tmp_path, "this", "do that")
    assert file_digests(tmp_path, in_tar) == digests
    write_images(tmp_path / "images", 6, seed=1)
    pack(1, names[3:])
    with pytest.raises(UserError, match=r"another image `1.tar/class"):
        require_same_files(digests, tmp_path, "this", "do that")
    (tmp_path / "2.tar").write_bytes(b"no tar file")
    assert file_digests(tmp_path, ["2.tar/a.png"]) == {}
    monkeypatch.setattr(image_files, "SAMPLED_TAR_FILES", 1)
    assert {name.partition("/")[0] for name in file_digests(tmp_path, in_tar)} == {"0.tar"}


def test_what_is_computed_of_images_is_found_again_wherever_these_are(tmp_path):
    names = write_images(tmp_path / "here", 3)
    settings = dict(layer=1, data_root=str(tmp_path / "here"))
    folder = folder_of(tmp_path / "features", settings, names)
    shutil.move(tmp_path / "here", tmp_path / "there")
    moved = dict(settings, data_root=str(tmp_path / "there"))
    assert folder_of(tmp_path / "features", moved, names) == folder
    assert folder_of(tmp_path / "features", dict(moved, layer=2), names) != folder
    write_images(tmp_path / "there", 3, seed=1)
    with pytest.raises(UserError, match=r"features/.* was made of another image"):
        folder_of(tmp_path / "features", moved, names)
