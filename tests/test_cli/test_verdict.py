"""What a pre-training holds out: a tenth of each class, lists of it, and a config that keeps to them."""

import argparse
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from mmengine.config import Config

from mapet_mm.cli import verdict
from mapet_mm.cli.verdict import (
    add_entries,
    classes_of,
    drop_skipped,
    hold_out,
    read_labels,
    voting_images,
    write_lists,
)
from mapet_mm.structures import TokenStore
from mapet_mm.utils.errors import UserError

COUNTS = {"a": 100, "b c": 40, "d": 3}


def names_of(counts: dict[str, int]) -> list[str]:
    return [f"{name}/{index:03d}.jpg" for name, count in counts.items() for index in range(count)]


NAMES = names_of(COUNTS)


def folder(name: str) -> str:
    return name.partition("/")[0]


def test_a_tenth_of_each_class_is_held_out_by_seed(monkeypatch):
    classes, _ = classes_of(None, NAMES)
    held_out = hold_out(NAMES, classes, seed=0)
    assert Counter(map(folder, held_out)) == {"a": 10, "b c": 4}
    assert held_out == hold_out(NAMES[::-1], classes, seed=0) != hold_out(NAMES, classes, seed=1)
    assert len(hold_out(NAMES, None, seed=0)) == 14
    monkeypatch.setattr(verdict, "MOST", 7)
    assert Counter(map(folder, hold_out(NAMES, classes, seed=0))) == {"a": 5, "b c": 2}


def test_ten_images_of_each_class_vote_first(monkeypatch):
    """So that ten labels a class are there; then the classes in proportion."""
    classes = {name: folder(name) for name in NAMES}
    few = voting_images(NAMES, classes, 23, seed=0)
    assert Counter(map(folder, few)) == {"a": 10, "b c": 10, "d": 3}
    more = Counter(map(folder, voting_images(NAMES, classes, 73, seed=0)))
    assert more["a"] == pytest.approx(50, abs=3)
    assert len(set(voting_images(NAMES, classes, 1000, seed=0))) == len(NAMES)


def test_classes_are_folders_or_a_file_and_otherwise_there_are_none(tmp_path):
    assert classes_of(None, ["a.jpg", "b/c.jpg", "b/d.jpg"])[0] is None
    assert classes_of(None, ["2020/a.jpg", "2020/b.jpg"])[0] is None
    assert classes_of(None, ["train/x/1.jpg", "train/y/2.jpg", "val/x/3.jpg", "val/y/4.jpg"])[0] == {
        "train/x/1.jpg": "x",
        "train/y/2.jpg": "y",
        "val/x/3.jpg": "x",
        "val/y/4.jpg": "y",
    }
    file = tmp_path / "labels.txt"
    file.write_text("my cat.jpg cat\nb/1.jpg\tgreat dane\n\n")
    assert read_labels(file, ["b/1.jpg", "my cat.jpg"]) == {"b/1.jpg": "great dane", "my cat.jpg": "cat"}


# `str.splitlines` would end a line at each of these.
ODD = [f"a{character}b.jpg" for character in "\x0b\x0c\x1c\x85\u2028\u2029"]


def test_names_may_hold_what_splitlines_takes_for_a_line_break(tmp_path):
    names = ["\u2028.jpg", *ODD]
    labels = {name: str(index % 2) for index, name in enumerate(names)}
    lines = "".join(f"{name}\t{label}\r\n" for name, label in labels.items())
    (tmp_path / "labels.txt").write_bytes(lines.encode())  # as Windows writes it
    assert read_labels(tmp_path / "labels.txt", names) == labels

    store = TokenStore.create(tmp_path / "tokens", names, (1, 1), 8, "digest")
    store.write([], np.empty((0, 1, 1), int), {names.index(ODD[0]): "broken", names.index(ODD[1]): "broken"})
    listed = [f"{name} 0" for name in ODD]
    for file in (verdict.VOTING, verdict.TESTED):
        (tmp_path / file).write_text("\n".join(listed))
    drop_skipped(tmp_path)
    for file in (verdict.VOTING, verdict.TESTED):
        assert (tmp_path / file).read_text() == "\n".join(listed[2:])


@pytest.mark.parametrize(
    ("text", "noun"),
    [("1.jpg a\n", "2.jpg"), ("1.jpg a\n2.jpg\n", "line 2"), ("1.jpg a\n2.jpg a\n", "one class")],
)
def test_a_file_of_labels_that_says_too_little_is_refused(tmp_path, text, noun):
    (tmp_path / "labels.txt").write_text(text)
    with pytest.raises(UserError, match=noun):
        read_labels(tmp_path / "labels.txt", ["1.jpg", "2.jpg"])


def lists(out: Path, names: list[str] = NAMES, **changes: object) -> dict[str, list[str]]:
    options = dict(out=out, labels=None, no_verdict=False, seed=0, epochs=100)
    print(*write_lists(argparse.Namespace(**{**options, **changes}), names))
    return {path.name: path.read_text().splitlines() for path in out.iterdir()}


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
    ({**{f"{index:03d}": 25 for index in range(160)}, "misc": 60}, 40, 40, 5),
    ({**{f"{index:03d}": 1 for index in range(98)}, "98": 2, "99": 2}, 10_000, 10, 0),
]


@pytest.mark.parametrize(("counts", "most", "num_held_out", "num_labelled"), SMALL_CLASSES)
def test_small_classes_are_held_out_in_turn(
    counts, most, num_held_out, num_labelled, tmp_path, monkeypatch, capsys
):
    """Without labels, if too few of them have images on both sides."""
    monkeypatch.setattr(verdict, "MOST", most)
    found = lists(tmp_path, names_of(counts))
    assert len(found["held_out.txt"]) == num_held_out
    has_labels = bool(found["verdict_train.txt"])
    assert has_labels == bool(num_labelled)
    assert len(found["verdict_val.txt"]) >= (num_labelled or num_held_out)
    assert ("too few have images" in capsys.readouterr().out) != has_labels
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
    drop_skipped(tmp_path)
    left = [(tmp_path / f"verdict_{name}.txt").read_text() for name in ("train", "val")]
    assert left == ["a.jpg 0", "c.jpg 0"]


def test_a_short_training_has_a_smaller_verdict_and_none_if_nobody_wants_one(tmp_path):
    """Two epochs of 143 images are 286 images: a tenth are 28."""
    found = lists(tmp_path, epochs=2)
    assert len(found["verdict_train.txt"]) + len(found["verdict_val.txt"]) == 28
    (tmp_path / "other").mkdir()
    assert lists(tmp_path / "other", no_verdict=True) == {}


def test_the_config_trains_without_the_held_out_images_and_measures_on_them(tmp_path):
    """k-NN during the training passes few images: a twentieth of those trained on."""
    lists(tmp_path)
    steps = [dict(type="LoadImageFromFile"), dict(type="ColorJitter"), dict(type="mapet_mm.LoadTokenGrid")]
    pipeline = [*steps, dict(type="PackInputs", algorithm_keys=["token_grid"])]
    dataset = dict(type="CustomDataset", ann_file="images.txt", with_label=False, pipeline=pipeline)
    loader = dict(batch_size=4, num_workers=0, persistent_workers=False, dataset=dataset)
    cfg = Config(dict(train_dataloader=loader, train_cfg=dict(max_epochs=300), custom_hooks=[]))
    add_entries(cfg, argparse.Namespace(out=tmp_path))
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
    assert (probe.interval, cfg.train_cfg.val_interval, probe.most_images) == (30, 30, 129 * 30 // 20)
