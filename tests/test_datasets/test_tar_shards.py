"""Images in tar files are those of the folder that the files were made of."""

import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from mmengine.registry import init_default_scope
from PIL import Image

from mapet_mm.datasets import tar_shards
from mapet_mm.registry import DATASETS
from mapet_mm.structures.image_names import relative_name
from mapet_mm.utils.errors import UserError

NAMES = ["n01/a.png", "n01/b.png", "n02/c.png", "n02/d.png"]


@pytest.fixture
def shards(tmp_path) -> Path:
    """Two tar files with two images each, and their labels, which do not count."""
    rng = np.random.default_rng(0)
    for name in NAMES:
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(256, size=(9, 7, 3), dtype=np.uint8)).save(path)
        path.with_suffix(".cls").write_text("3")
    (tmp_path / "shards").mkdir()
    for number, names in enumerate((NAMES[:2], NAMES[2:])):
        with tarfile.open(tmp_path / "shards" / f"{number}.tar", "w") as file:
            for name in names:
                for member in (name, name.replace("png", "cls")):
                    file.add(tmp_path / "folder" / member, member)
    return tmp_path / "shards"


def build(shards: Path, **options):
    init_default_scope("mmpretrain")
    pipeline = [dict(type="mapet_mm.LoadImageFromTar")]
    return DATASETS.build(
        dict(type="mapet_mm.TarShards", data_root=str(shards), pipeline=pipeline, **options)
    )


def test_images_are_read_in_any_order_under_names_of_file_and_member(shards):
    dataset = build(shards)
    assert len(dataset) == 4
    for index in (3, 0, 2, 1):
        results = dataset[index]
        expected = np.asarray(Image.open(shards.parent / "folder" / NAMES[index]))[..., ::-1]
        assert np.array_equal(results["img"], expected)
        assert results["img_shape"] == (9, 7)
        assert relative_name(results["img_path"], shards) == f"{index // 2}.tar/{NAMES[index]}"


def test_a_tar_file_is_listed_once_until_it_changes(shards, monkeypatch):
    listed = []
    list_images = tar_shards.list_images
    monkeypatch.setattr(tar_shards, "list_images", lambda path: listed.append(path) or list_images(path))
    first = build(shards, index_root=str(shards.parent))
    again = build(shards, index_root=str(shards.parent))
    assert [again.get_data_info(i) for i in range(4)] == [first.get_data_info(i) for i in range(4)]
    os.utime(shards / "1.tar")
    build(shards, index_root=str(shards.parent))
    assert [path.name for path in listed] == ["0.tar", "1.tar", "1.tar"]
    assert sorted(path.name for path in shards.iterdir()) == ["0.tar", "1.tar"]


@pytest.mark.parametrize(
    ("content", "pattern", "match"),
    [(b"\x1f\x8b compressed", "*.tar", "uncompressed"), (b"", "*.tgz", "no file")],
)
def test_other_files_are_refused(content, pattern, match, tmp_path):
    (tmp_path / "0.tar").write_bytes(content)
    with pytest.raises(UserError, match=match):
        build(tmp_path, pattern=pattern)


def test_an_image_that_cannot_be_decoded_is_named(shards):
    dataset = build(shards)
    info = dataset.get_data_info(1)
    with open(info["shard"], "r+b") as file:
        file.seek(info["offset"])
        file.write(bytes(info["size"]))
    with pytest.raises(UserError, match="n01/b"):
        dataset[1]
