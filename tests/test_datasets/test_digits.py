"""The embedded dataset: the same files for the same seed, balanced, and no digit on both sides."""

import hashlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mapet_mm.datasets.digits import DigitsOptions, load_source, render_ink, split_source, write_digits
from mapet_mm.datasets.digits_scenes import (
    ScenesOptions,
    digit_things,
    write_pixel_labels,
    write_scenes,
    write_unlabelled_scenes,
)
from mapet_mm.datasets.scenes import LUMINANCE, compose_scenes, contrasting_colour

SCENES = ScenesOptions(training=24, validation=12)
INK_LEVEL = 128  # at or above this, of 255, a pixel is labelled


def digest(folder: Path) -> str:
    """One digest of all names and contents below a folder."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            total.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return total.hexdigest()


def read_list(path: Path) -> list[tuple[str, int]]:
    return [(name, int(label)) for name, label in (line.split() for line in path.read_text().splitlines())]


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "digits"
    assert write_digits(folder)
    return folder


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "digits_scenes"
    assert write_scenes(folder, SCENES)
    return folder


def test_same_seed_gives_the_same_files_and_another_seed_others(tmp_path, digits, scenes):
    write_digits(tmp_path / "digits")
    write_scenes(tmp_path / "scenes", SCENES)
    write_scenes(tmp_path / "other", ScenesOptions(training=24, validation=12, seed=1))
    assert digest(tmp_path / "digits") == digest(digits)
    assert digest(tmp_path / "scenes") == digest(scenes)
    assert digest(tmp_path / "other" / "images") != digest(scenes / "images")


def test_lists_cover_all_digits_and_the_held_out_and_short_ones_are_balanced(digits):
    train, val, few = (read_list(digits / "meta" / f"{name}.txt") for name in ("train", "val", "train_100"))
    assert (len(train), len(val), len(few)) == (1437, 360, 100)
    assert set(Counter(label for _, label in val).values()) == {36}
    assert set(Counter(label for _, label in few).values()) == {10}
    assert set(few) < set(train)
    assert not set(train) & set(val)


def test_listed_files_are_the_folder_and_hold_the_digit_they_are_named_by(digits):
    for part in ("train", "val"):
        listed = read_list(digits / "meta" / f"{part}.txt")
        files = {p.relative_to(digits / part).as_posix() for p in (digits / part).rglob("*.png")}
        assert files == {name for name, _ in listed}
        for name, label in listed[::50]:
            image, row = np.asarray(Image.open(digits / part / name)), int(Path(name).stem)
            assert image.shape == (24, 24, 3)
            assert label == int(Path(name).parent.name) == load_source().labels[row]
            np.testing.assert_array_equal(image, np.stack([render_ink(row, 24)] * 3, axis=-1))


def read_scenes(scenes: Path, part: str):
    for line in (scenes / "meta" / f"{part}.jsonl").read_text().splitlines():
        meta = json.loads(line)
        image, label = (
            np.asarray(Image.open(scenes / d / part / meta["name"])) for d in ("images", "annotations")
        )
        yield image, label, meta["digits"]


@pytest.mark.parametrize(("part", "count"), [("training", 24), ("validation", 12)])
def test_pixel_labels_are_exactly_the_ink_of_the_scenes_digits(scenes, part, count):
    seen = 0
    for image, label, digits in read_scenes(scenes, part):
        assert image.shape == (64, 64, 3)
        expected = np.zeros((64, 64), np.uint8)
        for digit in digits:
            left, top, side = digit["box"]
            ink = render_ink(digit["row"], side) >= INK_LEVEL
            expected[top : top + side, left : left + side][ink] = load_source().labels[digit["row"]] + 1
        np.testing.assert_array_equal(label, expected)
        seen += 1
    assert seen == count


@pytest.mark.parametrize("level", [0.0, 0.125, 0.25, 0.375, 0.5])
def test_ink_stands_out_from_the_background_it_is_painted_on(level):
    rng = np.random.default_rng(0)
    for _ in range(50):
        colour = contrasting_colour(rng, np.full(3, level))
        assert colour @ LUMINANCE - level > 0.3


def test_no_validation_digit_is_in_a_training_scene_and_none_the_other_way(scenes):
    split = split_source(SCENES.val_per_class, 1, SCENES.seed)
    rows = {
        part: {digit["row"] for *_, digits in read_scenes(scenes, part) for digit in digits}
        for part in ("training", "validation")
    }
    assert rows["training"] <= set(split.train.tolist())
    assert rows["validation"] <= set(split.val.tolist())
    assert not rows["training"] & rows["validation"]


def test_more_scenes_keep_the_first_ones():
    things = digit_things(SCENES)
    few, many = (next(compose_scenes(things, ScenesOptions(training=n), "training")) for n in (1, 9))
    np.testing.assert_array_equal(few.image, many.image)


def test_pixel_labels_of_the_digits_are_their_ink_and_the_short_list_comes_first(digits, tmp_path):
    folder = tmp_path / "pixels"
    assert write_pixel_labels(folder)
    for part, name, count in (("training", "train", 1437), ("validation", "val", 360)):
        made = list(read_scenes(folder, part))
        assert len(made) == count
        listed = {int(Path(path).stem): label for path, label in read_list(digits / "meta" / f"{name}.txt")}
        assert {things[0]["row"]: things[0]["digit"] for *_, things in made} == listed
        for image, label, ((row, digit),) in ((i, y, [one.values() for one in t]) for i, y, t in made[::40]):
            np.testing.assert_array_equal(image[..., 0], render_ink(row, 24))
            np.testing.assert_array_equal(label, np.where(render_ink(row, 24) >= INK_LEVEL, digit + 1, 0))
        if part == "training":
            few = {int(Path(path).stem) for path, _ in read_list(digits / "meta" / "train_100.txt")}
            assert {things[0]["row"] for *_, things in made[:100]} == few


def test_unlabelled_scenes_are_other_ones_of_the_same_split(scenes, tmp_path):
    folder, own = tmp_path / "unlabelled", ScenesOptions(training=24, validation=12)
    assert write_unlabelled_scenes(folder, own)
    assert {path.name for path in folder.iterdir()} == {"digits.json", "meta", "train", "val"}
    for part, (name, count) in zip(("training", "validation"), (("train", 24), ("val", 12)), strict=True):
        names = (folder / "meta" / f"{name}.txt").read_text().splitlines()
        assert names == sorted(path.name for path in (folder / name).iterdir())
        assert len(names) == count
        # By their own seed, of the digits of the labelled scenes' split.
        made = compose_scenes(digit_things(own), replace(own, seed=1), part)
        for file, scene in zip(names, made, strict=True):
            image = np.asarray(Image.open(folder / name / file))
            np.testing.assert_array_equal(image, scene.image)
            assert (image != np.asarray(Image.open(scenes / "images" / part / file))).any()
    assert not write_unlabelled_scenes(folder, own)
    with pytest.raises(FileExistsError, match="training 24 -> 25"):
        write_unlabelled_scenes(folder, replace(own, training=25))


def test_second_run_leaves_the_files_and_other_options_ask_for_overwrite(tmp_path):
    folder, small = tmp_path / "scenes", ScenesOptions(training=2, validation=1)
    assert write_scenes(folder, small)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.png")}
    assert not write_scenes(folder, small)
    with pytest.raises(FileExistsError, match=r"training 2 -> 3.*--overwrite"):
        write_scenes(folder, ScenesOptions(training=3, validation=1))
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.png")} == before
    assert write_scenes(folder, ScenesOptions(training=3, validation=1), overwrite=True)
    assert len(list((folder / "images" / "training").iterdir())) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["scenes"]


def test_folder_that_is_not_ours_is_never_replaced(tmp_path):
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="not written by this tool"):
        write_digits(tmp_path / "digits", overwrite=True)
    assert (tmp_path / "digits" / "thesis.txt").read_text() == "years of work"


def test_interrupted_writing_leaves_what_was_there(tmp_path, monkeypatch):
    folder = tmp_path / "scenes"
    write_scenes(folder, ScenesOptions(training=1, validation=1))
    before = digest(folder)
    monkeypatch.setattr(Image.Image, "save", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_scenes(folder, ScenesOptions(training=5, validation=1), overwrite=True)
    assert digest(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["scenes"]


def test_a_folder_that_cannot_take_the_place_of_the_old_one_gives_it_back(tmp_path, monkeypatch):
    folder, rename = tmp_path / "scenes", Path.rename
    write_scenes(folder, ScenesOptions(training=1, validation=1))
    before = digest(folder)

    def refuse_new(self: Path, target: Path) -> Path:
        if target == folder and (self / "digits.json").exists() and digest(self) != before:
            raise OSError("disk full")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_new)
    with pytest.raises(OSError, match="disk full"):
        write_scenes(folder, ScenesOptions(training=2, validation=1), overwrite=True)
    assert digest(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["scenes"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (lambda: DigitsOptions(val_per_class=170), "val_per_class 170"),
        (lambda: DigitsOptions(seed=-1), "seed is -1"),
        (lambda: ScenesOptions(max_size=80), "max_size 80"),
        (lambda: ScenesOptions(min_digits=6), "min_digits 6"),
    ],
)
def test_impossible_options_are_refused_by_name(options, match):
    with pytest.raises(ValueError, match=match):
        options()


@pytest.mark.parametrize("domain", ["inverted", "rotated"])
def test_other_domains_show_the_same_digits_of_the_same_split(domain, digits, tmp_path):
    write_digits(tmp_path / "other", DigitsOptions(domain=domain))
    for name in ("train", "val", "train_100"):
        listed = (tmp_path / "other" / "meta" / f"{name}.txt").read_text()
        assert listed == (digits / "meta" / f"{name}.txt").read_text()
    name, _ = read_list(digits / "meta" / "val.txt")[7]
    plain, other = (np.asarray(Image.open(root / "val" / name)) for root in (digits, tmp_path / "other"))
    if domain == "inverted":
        np.testing.assert_array_equal(other, 255 - plain)
    else:
        assert not np.array_equal(other, plain)
        # Turning moves ink and keeps nearly all of it.
        assert 0.7 * plain.sum() < other.sum() < 1.1 * plain.sum()


def test_angles_are_the_digits_own_and_within_a_quarter_turn():
    """Each row its angle, the same whenever it is written; a half circle of them, so that 6 is never a 9."""
    from mapet_mm.datasets.digits import DOMAINS

    ink = render_ink(6, 24)
    turned = [DOMAINS["rotated"](ink, row) for row in range(20)]
    assert len({image.tobytes() for image in turned}) == 20
    np.testing.assert_array_equal(turned[3], DOMAINS["rotated"](ink, 3))
    upside_down = np.rot90(ink, 2).astype(float)
    for image in turned:
        difference = [np.abs(image - other).mean() for other in (ink.astype(float), upside_down)]
        assert difference[0] < difference[1] or min(difference) > 20


def test_unknown_domain_is_refused():
    with pytest.raises(ValueError, match="domain is 'blue': one of plain, inverted, rotated"):
        DigitsOptions(domain="blue")
