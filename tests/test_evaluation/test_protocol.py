"""Protocols are chosen by config, and their rows are told apart and put into one table."""

from types import SimpleNamespace

import pytest
import torch
from frozen_features import PROTOCOLS
from mmengine.config import Config
from sklearn.metrics import balanced_accuracy_score

from mapet_mm.evaluation.features import take_features
from mapet_mm.evaluation.image_sets import read_image_sets
from mapet_mm.evaluation.models import load_checkpoint
from mapet_mm.evaluation.protocol import (
    Evaluated,
    Row,
    build_protocols,
    choose_protocols,
    evaluate,
    results_table,
)
from mapet_mm.evaluation.protocols.knn import NearestNeighbours
from mapet_mm.utils.errors import UserError


def names(protocols) -> list[str]:
    return [type(protocol).__name__ for protocol in protocols]


def labelled(*labels: list[int] | None) -> dict:
    return {
        name: SimpleNamespace(name=name, labels=None if one is None else torch.tensor(one), class_names=None)
        for name, one in zip(("train", "val"), labels, strict=True)
    }


def test_declared_protocols_run_where_their_images_are(config, capsys):
    config.evaluation.protocols.append(dict(type="SegmentationByNeighbours"))
    chosen = choose_protocols(config, None, None, labelled([0, 1], [0, 1]))
    assert names(chosen) == [one["type"] for one in PROTOCOLS]
    assert (chosen[0].k, chosen[1].rates) == (3, [0.1, 1.0])
    assert "no SegmentationByNeighbours: there are no `dense_train` images" in capsys.readouterr().out
    assert names(choose_protocols(config, None, ["LowShot"], labelled([0, 1], [0, 1]))) == ["LowShot"]


def test_without_a_declaration_all_run_that_the_images_suit(config, root, capsys):
    unlabelled, plain = labelled(None, None), Config(dict())
    assert not {"NearestNeighbours", "LowShot"} & {*names(choose_protocols(plain, None, None, unlabelled))}
    assert "no NearestNeighbours: the `train` images have no labels" in capsys.readouterr().out
    assert "LowShot" in names(choose_protocols(plain, None, None, labelled([0, 1], [1])))
    with pytest.raises(UserError, match="--protocols Nearest"):
        choose_protocols(config, None, ["Nearest"], labelled([0, 1], [1]))
    with pytest.raises(UserError, match="no labels"):  # asked for
        choose_protocols(plain, None, ["LowShot"], unlabelled)
    elsewhere = str(root / "config.py")
    assert len(choose_protocols(plain, elsewhere, None, labelled([0, 1], [1]))) == len(PROTOCOLS)
    assert len(choose_protocols(config, str(root), ["LowShot"], labelled([0, 1], [1]))) == 1  # a folder


def test_two_rows_of_one_name_are_refused(config, root):
    """A table's column would show one of them."""
    checkpoint, images = load_checkpoint(config, None), read_image_sets(config)
    with pytest.raises(UserError, match="two results `k-NN, class token`"):
        evaluate(checkpoint, images, build_protocols(PROTOCOLS[:1] * 2), root / "cache")


def test_the_table_has_a_column_per_checkpoint_and_a_line_per_figure():
    first = [Row("k-NN", "mean", 81.25), Row("RankMe", "mean", 0.5, "rank")]
    first.append(Row("k-NN", "layer 1", 1, detail=True))
    second = [Row("k-NN", "mean", 79.0, spread=1.25, note="rate 1")]
    table = results_table({"one": first, "two": second})
    assert [column.heading for column in table.columns] == ["result", "figure", "one", "two"]
    assert table.rows == [
        ["k-NN, mean", "top-1, %", "81.2", "79.0 ± 1.2 (rate 1)"],
        ["RankMe, mean", "rank", "0.500", None],
    ]


def test_a_figure_per_class_is_scikit_learns_balanced_accuracy(config, root):
    """An interval's draws may miss a class."""
    images, checkpoint = read_image_sets(config), load_checkpoint(config, str(root / "weights.pth"))
    images["val"].per_class = True
    images["val"].labels[:2] = 1  # one image of class 0, five of class 1, three of class 2
    features = {name: take_features(checkpoint, images[name], root / "cache") for name in ("train", "val")}
    scores = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    (row,) = NearestNeighbours().rows(Evaluated(features, images, "cpu"), "mean", lambda bank: scores)
    expected = 100 * balanced_accuracy_score(images["val"].labels, scores.argmax(1))
    assert row.value == pytest.approx(expected)
    assert expected != pytest.approx(100 * (scores.argmax(1) == images["val"].labels).double().mean())
    assert row.unit == "mean per class, %"
    assert row.interval[0] < row.value < row.interval[1]


def test_only_the_features_that_are_needed_are_taken(config, root):
    images, checkpoint = read_image_sets(config), load_checkpoint(config, str(root / "weights.pth"))
    rows = evaluate(checkpoint, images, build_protocols(PROTOCOLS[:1]), root / "cache")
    assert [row.setting for row in rows] == ["class token", "mean", "both"]
    assert not list((root / "cache").glob("*/tokens"))


def test_of_several_processes_only_the_first_has_rows_and_words(config, root, monkeypatch, capsys):
    checkpoint, images = load_checkpoint(config, None), read_image_sets(config)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert evaluate(checkpoint, images, build_protocols(PROTOCOLS[:1]), root / "cache") == []
    assert len(list((root / "cache").glob("*/pooled/000000.npy"))) == 2
    assert not capsys.readouterr().out
