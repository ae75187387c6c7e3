"""The embedded dataset: always the same files, balanced, and no digit on both sides."""

import hashlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from dataset_converters.digits import (
    DOMAINS,
    load_source,
    render_ink,
    write_digits,
    write_pixel_labels,
)
from PIL import Image
from toy_data import read_list, read_scenes

INK_LEVEL = 128  # at or above this, of 255, a pixel is labelled


def digest(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            total.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return total.hexdigest()


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for domain in DOMAINS:
        assert write_digits(folder / domain, domain)
    assert write_pixel_labels(folder / "pixels")
    return folder


def test_the_files_are_the_ones_that_the_committed_figures_stand_on(written):
    """Pixels of one Pillow version; another one may change this digest, and then the figures."""
    images = np.concatenate([np.asarray(Image.open(p)) for p in sorted(written.glob("plain/val/*/*.png"))])
    assert hashlib.sha256(images.tobytes()).hexdigest()[:16] == "bbca3d2d927ac906"
    names = (written / "plain/meta/train_100.txt").read_bytes()
    assert hashlib.sha256(names).hexdigest()[:16] == "09b7dc8d03f0a180"


def test_lists_cover_all_digits_and_the_held_out_and_short_ones_are_balanced(written):
    train, val, few = (
        read_list(written / f"plain/meta/{name}.txt") for name in ("train", "val", "train_100")
    )
    assert (len(train), len(val), len(few)) == (1437, 360, 100)
    assert set(Counter(label for _, label in val).values()) == {36}
    assert set(Counter(label for _, label in few).values()) == {10}
    assert set(few) < set(train)
    assert not set(train) & set(val)


@pytest.mark.parametrize("domain", DOMAINS)
def test_every_domain_shows_the_listed_digits_of_one_split(domain, written):
    for part in ("train", "val"):
        listed = read_list(written / domain / f"meta/{part}.txt")
        assert listed == read_list(written / f"plain/meta/{part}.txt")
        files = {
            p.relative_to(written / domain / part).as_posix() for p in written.glob(f"{domain}/{part}/*/*")
        }
        assert files == {name for name, _ in listed}
        for name, label in listed[::50]:
            image, row = np.asarray(Image.open(written / domain / part / name)), int(Path(name).stem)
            assert image.shape == (24, 24, 3)
            assert label == int(Path(name).parent.name) == load_source().labels[row]
            np.testing.assert_array_equal(image, np.stack([render_ink(row, 24, domain)] * 3, axis=-1))
            ink = render_ink(row, 24).astype(int)
            if domain == "inverted":
                np.testing.assert_array_equal(image[..., 0], 255 - ink)
            elif domain == "rotated":  # turning moves ink and keeps nearly all of it
                assert 0.7 * ink.sum() < image[..., 0].sum() < 1.1 * ink.sum()


def test_pixel_labels_of_the_digits_are_their_ink_and_the_short_list_comes_first(written):
    for part, name, count in (("training", "train", 1437), ("validation", "val", 360)):
        made = list(read_scenes(written / "pixels", part, "digits"))
        assert len(made) == count
        listed = {
            int(Path(path).stem): label for path, label in read_list(written / f"plain/meta/{name}.txt")
        }
        assert {things[0]["row"]: things[0]["digit"] for *_, things in made} == listed
        for image, label, ((row, digit),) in ((i, y, [one.values() for one in t]) for i, y, t in made[::40]):
            np.testing.assert_array_equal(image[..., 0], render_ink(row, 24))
            np.testing.assert_array_equal(label, np.where(render_ink(row, 24) >= INK_LEVEL, digit + 1, 0))
        if part == "training":
            few = {int(Path(path).stem) for path, _ in read_list(written / "plain/meta/train_100.txt")}
            assert {things[0]["row"] for *_, things in made[:100]} == few


def test_a_folder_is_left_as_it_is_and_never_replaced(tmp_path):
    folder = tmp_path / "digits"
    assert write_digits(folder, "inverted")
    before = digest(folder)
    assert not write_digits(folder, "inverted")
    with pytest.raises(FileExistsError, match=r"domain: inverted, now rotated"):
        write_digits(folder, "rotated")
    assert digest(folder) == before
    (tmp_path / "thesis").mkdir()
    with pytest.raises(FileExistsError, match="not written by this tool"):
        write_digits(tmp_path / "thesis")
