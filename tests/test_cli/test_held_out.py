"""What a pre-training holds out: a tenth of each class, lists of it, and a config that keeps to them."""

import hashlib
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from held_out_lists import COUNTS, NAMES, SLICES, lists, names_of, patients
from mmengine.config import Config

from mapet_mm.cli import held_out
from mapet_mm.cli.configs import leave_out
from mapet_mm.cli.held_out import (
    draw_held_out,
    drop_skipped,
    voting_images,
)
from mapet_mm.datasets.labels import Labels, labels_of
from mapet_mm.structures import TokenStore
from mapet_mm.utils.run_folder import HELD_OUT, TESTED, TRAINED, VOTING, Run


def folder(name: str) -> str:
    return name.partition("/")[0]


def test_a_tenth_of_each_class_is_held_out_by_seed(monkeypatch):
    labels = labels_of(NAMES)
    drawn = draw_held_out(NAMES, labels, seed=0)
    assert Counter(map(folder, drawn)) == {"a": 10, "b c": 4}
    assert drawn == draw_held_out(NAMES[::-1], labels, seed=0) != draw_held_out(NAMES, labels, seed=1)
    assert len(draw_held_out(NAMES, Labels(NAMES), seed=0)) == 14
    monkeypatch.setattr(held_out, "MOST", 7)
    assert Counter(map(folder, draw_held_out(NAMES, labels, seed=0))) == {"a": 5, "b c": 2}


GOLDEN = [
    # images of each class, seed, epochs, and the beginning of the four lists' SHA-256
    (COUNTS, 0, 300, "ecb39a1f8310f295"),
    ({**{f"{index:03d}": 4 for index in range(300)}, "misc": 100}, 0, 300, "9e59a0ee30bac625"),
    ({f"{index:03d}": 1 + index % 7 for index in range(90)}, 3, 1, "d0e997095db3568d"),
    ({"x": 777}, 5, 2, "16be089ce2402624"),
    ({"a": 3000, "b": 1000}, 1, 1, "03d22230b6d346b5"),
]


@pytest.mark.parametrize(("counts", "seed", "epochs", "digest"), GOLDEN)
def test_without_groups_the_lists_are_those_of_earlier_versions(counts, seed, epochs, digest, tmp_path):
    lists(tmp_path, sorted(names_of(counts)), seed=seed, epochs=epochs)
    whole = hashlib.sha256()
    for name in (TRAINED, HELD_OUT, VOTING, TESTED):
        whole.update((tmp_path / name).read_bytes() + b"|")
    assert whole.hexdigest().startswith(digest)


def test_ten_images_of_each_class_vote_first(monkeypatch):
    """So that ten labels a class are there; then the classes in proportion."""
    labels = labels_of(NAMES)
    few = voting_images(NAMES, labels, 23, seed=0)
    assert Counter(map(folder, few)) == {"a": 10, "b c": 10, "d": 3}
    more = Counter(map(folder, voting_images(NAMES, labels, 73, seed=0)))
    assert more["a"] == pytest.approx(50, abs=3)
    assert len(set(voting_images(NAMES, labels, 1000, seed=0))) == len(NAMES)


# `str.splitlines` would end a line at each of these.
ODD = [f"a{character}b.jpg" for character in "\x0b\x0c\x1c\x85\u2028\u2029"]


def test_names_may_hold_what_splitlines_takes_for_a_line_break(tmp_path):
    names = ["\u2028.jpg", *ODD]
    store = TokenStore.create(tmp_path / "tokens", names, (1, 1), 8, "digest")
    store.write([], np.empty((0, 1, 1), int), {names.index(ODD[0]): "broken", names.index(ODD[1]): "broken"})
    listed = [f"{name} 0" for name in ODD]
    for file in (VOTING, TESTED):
        (tmp_path / file).write_text("\n".join(listed))
    drop_skipped(Run(tmp_path))
    for file in (VOTING, TESTED):
        assert (tmp_path / file).read_text() == "\n".join(listed[2:])


def test_the_lists_keep_what_is_trained_on_apart(tmp_path):
    found = lists(tmp_path)
    trained, held_out = set(found["train.txt"]), set(found["held_out.txt"])
    assert trained | held_out == set(NAMES)
    assert not trained & held_out
    voting, tested = (
        [line.rsplit(" ", 1) for line in found[f"verdict_{name}.txt"]] for name in ("train", "val")
    )
    assert {name for name, _ in voting} <= trained
    assert {name for name, _ in tested} <= held_out
    assert {(folder(name), label) for name, label in voting} == {("a", "0"), ("b c", "1"), ("d", "2")}


SMALL_CLASSES = [
    # images of each class, the most that are held out, how many are, how many at least are tested by labels
    ({**{f"{index:03d}": 4 for index in range(300)}, "misc": 100}, 10_000, 130, 120),
    ({**{f"{index:03d}": 25 for index in range(160)}, "misc": 60}, 600, 406, 300),
    ({**{f"{index:03d}": 25 for index in range(160)}, "misc": 60}, 40, 40, 0),  # a vote for each class
    ({**{f"{index:03d}": 1 for index in range(98)}, "98": 2, "99": 2}, 10_000, 10, 0),
]


@pytest.mark.parametrize(("counts", "most", "num_held_out", "num_labelled"), SMALL_CLASSES)
def test_small_classes_are_held_out_in_turn(
    counts, most, num_held_out, num_labelled, tmp_path, monkeypatch, capsys
):
    """Without labels, if too few of them have images on both sides, or too few images vote."""
    monkeypatch.setattr(held_out, "MOST", most)
    found = lists(tmp_path, names_of(counts))
    assert len(found["held_out.txt"]) == num_held_out
    has_labels = bool(found["verdict_train.txt"])
    assert has_labels == bool(num_labelled)
    assert len(found["verdict_val.txt"]) >= (num_labelled or num_held_out)
    assert ("too few" in capsys.readouterr().out) != has_labels
    if has_labels:
        voting, tested = (
            {line.split()[1] for line in found[f"verdict_{name}.txt"]} for name in ("train", "val")
        )
        assert tested <= voting


def test_images_without_tokens_and_classes_without_votes_leave_the_lists(tmp_path):
    for name, lines in (("train", ["a.jpg 0", "b.jpg 1"]), ("val", ["c.jpg 0", "d.jpg 1", "e.jpg 0"])):
        (tmp_path / f"verdict_{name}.txt").write_text("\n".join(lines))
    store = TokenStore.create(tmp_path / "tokens", [f"{name}.jpg" for name in "abcde"], (2, 2), 16, "test")
    store.write([], np.empty((0, 2, 2), int), {1: "broken", 4: "broken"})
    drop_skipped(Run(tmp_path))
    left = [(tmp_path / f"verdict_{name}.txt").read_text() for name in ("train", "val")]
    assert left == ["a.jpg 0", "c.jpg 0"]


def test_lists_that_stay_as_they_are_are_not_written(tmp_path, monkeypatch):
    """A colleague's RUN may be where nothing can be written."""
    for name in ("train", "val"):
        (tmp_path / f"verdict_{name}.txt").write_text(f"{name}.jpg 0")
    TokenStore.create(tmp_path / "tokens", ["train.jpg", "val.jpg"], (2, 2), 16, "test")
    monkeypatch.setattr(held_out, "write_lines", lambda file, lines: pytest.fail(f"{file} was written"))
    drop_skipped(Run(tmp_path))


SHORT = [
    ({"a": 3000, "b": 1000}, 200, 200),
    ({"a": 1000, "b": 1000}, 100, 200),
    ({str(number): 100 for number in range(30)}, 150, 300),
    (COUNTS, 14, 129),  # all
]


@pytest.mark.parametrize(("counts", "num_tested", "num_voting"), SHORT)
def test_a_short_training_has_a_smaller_verdict(counts, num_tested, num_voting, tmp_path, capsys):
    """Of an epoch of 4,000 images a tenth are 400; but of any 200 vote, and ten of each class."""
    found = lists(tmp_path, names_of(counts), epochs=1)
    assert (len(found["verdict_val.txt"]), len(found["verdict_train.txt"])) == (num_tested, num_voting)
    k = {200: 20, 300: 20, 129: 12}[num_voting]
    assert f"{num_tested} of them tested, {num_voting} others vote (k = {k})" in capsys.readouterr().out


def test_there_is_no_verdict_if_nobody_wants_one(tmp_path):
    assert lists(tmp_path, no_verdict=True) == {}


def test_what_the_verdict_needs_is_asked_for_before_the_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)  # not installed
    lists(tmp_path, class_level=0)  # measures without labels need none
    with pytest.raises(ImportError, match="sklearn"):
        lists(tmp_path)


def test_the_config_trains_without_the_held_out_images_and_measures_on_them(tmp_path):
    """k-NN during the training passes few images: a twentieth of those trained on, or 200."""
    lists(tmp_path)
    steps = [dict(type="LoadImageFromFile"), dict(type="ColorJitter"), dict(type="mapet_mm.LoadTokenGrid")]
    pipeline = [*steps, dict(type="PackInputs", algorithm_keys=["token_grid"])]
    dataset = dict(type="CustomDataset", ann_file="images.txt", with_label=False, pipeline=pipeline)
    loader = dict(batch_size=4, num_workers=0, persistent_workers=False, dataset=dataset)
    cfg = Config(dict(train_dataloader=loader, train_cfg=dict(max_epochs=300), custom_hooks=[]))
    leave_out(cfg, Run(tmp_path), steps[:1])
    assert (cfg.train_dataloader.dataset.ann_file, cfg.val_dataloader.dataset.ann_file) == (
        "train.txt",
        "held_out.txt",
    )
    assert [step.type for step in cfg.val_dataloader.dataset.pipeline] == [
        *("LoadImageFromFile", "mapet_mm.LoadTokenGrid", "PackInputs")
    ]
    for name, own in cfg.evaluation.items():
        assert (own.dataset.ann_file, own.dataset.with_label) == (f"verdict_{name}.txt", True)
        assert [step.type for step in own.dataset.pipeline] == ["LoadImageFromFile", "PackInputs"]
    (probe,) = cfg.custom_hooks
    assert probe.k == 12  # as in the verdict, of 129 images
    assert (probe.interval, cfg.train_cfg.val_interval, probe.most_images) == (30, 30, 200)


def write_images(folder: Path, contents: dict[str, int]) -> list[str]:
    """Files, of which those with one number are copies."""
    for name, number in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"image %06d" % number)
    return sorted(contents)


def test_copies_of_an_image_stay_on_one_side_of_the_split(tmp_path, capsys):
    """80 images, each twice: none is tested or votes twice, and none is tested that was trained on."""
    contents = {f"{'ab'[number % 2]}/{number:03d}.jpg": number for number in range(80)}
    contents |= {name.replace(".", " (1)."): number for name, number in contents.items()}
    names = write_images(tmp_path / "images", contents)
    (tmp_path / "out").mkdir()
    found = lists(tmp_path / "out", names, images=tmp_path / "images")
    trained, held_out = ({contents[name] for name in found[file]} for file in ("train.txt", "held_out.txt"))
    assert (len(found["held_out.txt"]), len(held_out), len(trained & held_out)) == (16, 8, 0)
    for file, numbers in (("verdict_train.txt", trained), ("verdict_val.txt", held_out)):
        drawn = [contents[line.rpartition(" ")[0]] for line in found[file]]
        assert len(drawn) == len(set(drawn))
        assert set(drawn) == numbers
    assert "copies of other images, which stay on their side: 80" in capsys.readouterr().out


def test_an_image_outside_of_the_classes_trains_and_is_not_tested(tmp_path, capsys):
    """Also if it is a copy of one in a class, which then speaks for both."""
    contents = {f"{'no'[number % 2]}/{number:03d}.jpg": number for number in range(100)}
    contents |= {"cover.jpg": 100, "another.jpg": 50}
    names = write_images(tmp_path / "images", contents)
    (tmp_path / "out").mkdir()
    found = lists(tmp_path / "out", names, images=tmp_path / "images")
    assert "cover.jpg" in found["train.txt"]
    assert len(found["verdict_val.txt"]) == 10
    assert len(found["verdict_train.txt"]) == 90
    assert not any("cover" in line or "another" in line for line in found["verdict_train.txt"])
    printed = capsys.readouterr().out
    assert "2 classes (`n`, `o`)" in printed
    assert "2 outside of them" in printed


@pytest.mark.parametrize("level", [None, 0, 2])
def test_the_level_of_the_classes_can_be_said(tmp_path, level):
    names = [f"{kind}/{year}/{index}.jpg" for kind in "ab" for year in (1, 2, 3) for index in range(20)]
    found = lists(tmp_path, names, class_level=level)
    numbers = {line.rpartition(" ")[2] for line in found["verdict_train.txt"]}
    assert len(numbers) == {None: 2, 0: 0, 2: 3}[level]


def test_whole_groups_are_held_out_vote_and_are_tested(tmp_path, capsys):
    """A fifth of the images, so that eight patients are tested; a short training's images are of all."""
    (tmp_path / "labels.txt").write_text("".join(f"{name}\t{int(name[1:3]) % 2}\n" for name in SLICES))
    for epochs in (1, 300):
        out = tmp_path / str(epochs)
        out.mkdir()
        found = lists(out, SLICES, labels=tmp_path / "labels.txt", groups=1, epochs=epochs)
        assert len(found["held_out.txt"]) == 200
        assert len(found["groups.txt"]) == 1000
        assert not patients(found["train.txt"]) & patients(found["held_out.txt"])
        assert len(patients(found["verdict_val.txt"])) == 8
        assert patients(found["verdict_train.txt"]) == patients(found["train.txt"])
        assert Counter(int(patient[1:]) % 2 for patient in patients(found["held_out.txt"])) == {0: 4, 1: 4}
    printed = capsys.readouterr().out
    assert "200 images, 8 whole groups, are held out" in printed
    assert "40 groups (`p00`, `p01`" in printed
    assert len(lists(out, SLICES, groups=1)["verdict_train.txt"]) == 0
    assert "the folders at level 1 are groups, and no classes" in capsys.readouterr().out


def test_copies_across_groups_are_neither_tested_nor_vote_twice(tmp_path):
    """The first slice of each patient is black."""
    contents = {name: 0 if name.endswith("00.png") else index for index, name in enumerate(SLICES, start=1)}
    write_images(tmp_path / "images", contents)
    (tmp_path / "labels.txt").write_text("".join(f"{name}\t{int(name[1:3]) % 2}\n" for name in SLICES))
    (tmp_path / "out").mkdir()
    options = dict(images=tmp_path / "images", labels=tmp_path / "labels.txt", groups="1")
    found = lists(tmp_path / "out", SLICES, **options)
    assert len(patients(found["held_out.txt"])) == 8
    measured = [*found["verdict_train.txt"], *found["verdict_val.txt"]]
    assert sum(line.split()[0].endswith("/00.png") for line in measured) == 1
    assert not any(line.split()[0].endswith("/00.png") for line in found["verdict_val.txt"])


def test_few_or_large_groups_give_no_verdict_by_labels(tmp_path, capsys):
    names = [
        f"{kind}/p{patient}/{number}.png" for kind in "ab" for patient in range(4) for number in range(50)
    ]
    found = lists(tmp_path, names, groups=2)
    assert not found["verdict_train.txt"]
    assert "because too few have images to test" in capsys.readouterr().out
    names = [f"{kind}/p{number % 2}/{number}.png" for kind in "ab" for number in range(100)]
    (tmp_path / "other").mkdir()
    assert lists(tmp_path / "other", names, groups=2) == {}
    assert "verdict: none, because each group is too large" in capsys.readouterr().out


def test_where_hardly_an_image_has_a_class_there_is_no_verdict(tmp_path, capsys):
    names = ["a/1.png", "a/2.png", "b/1.png", "b/2.png", *(f"{number}.png" for number in range(90))]
    assert lists(tmp_path, names) == {}
    assert "verdict: none, because too few images have a class" in capsys.readouterr().out
