"""Protocols are chosen by config, and their rows are told apart and put into one table."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from frozen_features import PROTOCOLS
from mmengine.config import Config
from scipy import stats
from sklearn.metrics import balanced_accuracy_score

from mapet_mm.evaluation import run
from mapet_mm.evaluation.extraction import take_features
from mapet_mm.evaluation.image_sets import ImageSetError, read_image_sets
from mapet_mm.evaluation.models import load_checkpoint
from mapet_mm.evaluation.protocol import Evaluated, build_protocols, held_out
from mapet_mm.evaluation.protocols.knn import NearestNeighbours
from mapet_mm.evaluation.protocols.low_shot import LowShot
from mapet_mm.evaluation.rows import Row, bootstrap, mean_of_groups, results_table
from mapet_mm.evaluation.run import choose_protocols, evaluate
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
    chosen = choose_protocols(config, None, None, labelled([0, 0, 1], [0, 1]))
    assert names(chosen) == [one["type"] for one in PROTOCOLS]
    assert (chosen[0].k, chosen[1].rates) == (3, [0.1, 1.0])
    assert "no SegmentationByNeighbours: there are no `dense_train` images" in capsys.readouterr().out
    assert names(choose_protocols(config, None, ["LowShot"], labelled([0, 0, 1], [0, 1]))) == ["LowShot"]


def test_a_named_protocol_runs_as_often_as_it_is_declared(config):
    config.evaluation.protocols.append(dict(type="NearestNeighbours", k=5))
    chosen = choose_protocols(config, None, ["NearestNeighbours"], labelled([0, 0, 1], [0, 1]))
    assert [one.k for one in chosen] == [3, 5]


def test_without_a_declaration_all_run_that_the_images_suit(config, root, capsys):
    unlabelled, plain = labelled(None, None), Config(dict())
    assert not {"NearestNeighbours", "LowShot"} & {*names(choose_protocols(plain, None, None, unlabelled))}
    assert "no NearestNeighbours: the `train` images have no labels" in capsys.readouterr().out
    assert "LowShot" in names(choose_protocols(plain, None, None, labelled([0, 0, 1], [1])))
    with pytest.raises(UserError, match="--protocols Nearest"):
        choose_protocols(config, None, ["Nearest"], labelled([0, 0, 1], [1]))
    with pytest.raises(UserError, match="no labels"):  # asked for
        choose_protocols(plain, None, ["LowShot"], unlabelled)
    elsewhere = str(root / "config.py")
    assert len(choose_protocols(plain, elsewhere, None, labelled([0, 0, 1], [1]))) == len(PROTOCOLS)
    assert len(choose_protocols(config, str(root), ["LowShot"], labelled([0, 0, 1], [1]))) == 1  # a folder


def test_expensive_protocols_run_by_name_or_all(capsys):
    """The others come in the order of their cost, and a line says what is left out and how to ask."""
    plain, images = Config(dict()), labelled([0, 0, 1], [1])
    quick = choose_protocols(plain, None, None, images)
    assert names(quick) == ["NearestNeighbours", "LowShot", "LabelFree", "Regression"]
    assert (quick[1].shots, quick[3].layers) == ((1, 2, 5, 10), 1)
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("left out")]
    assert line == (
        "left out, to be quick: LowShot (other shots), Regression (other layers), LinearProbes, "
        "AttentiveProbe; --protocols NAME or --all runs them"
    )
    (named,) = choose_protocols(plain, None, ["LowShot"], images)
    assert named.shots == LowShot().shots
    everything = choose_protocols(plain, None, None, images, every=True)
    assert names(everything) == [*names(quick), "LinearProbes", "AttentiveProbe"]
    assert everything[3].layers is None


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


def test_each_row_is_shown_before_the_next_protocol_starts(config, root):
    """So that a slow one does not hide what is known."""
    shown, seen = [], []

    class Slow(NearestNeighbours):
        name = "slow"

        def run(self, evaluated):
            seen.extend(row.name for row in shown)
            return super().run(evaluated)

    checkpoint, images = load_checkpoint(config, None), read_image_sets(config)
    rows = evaluate(checkpoint, images, [NearestNeighbours(), Slow()], root / "cache", show=shown.append)
    assert seen == ["k-NN, class token", "k-NN, mean", "k-NN, both"]
    assert shown == rows


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


def test_held_out_images_are_every_tenth_of_each_class():
    """In a list in order, every tenth of all was of one class; few images leave one, an only one none."""
    mixed = torch.arange(200) % 10  # in file order
    assert mixed[held_out(mixed)].bincount().tolist() == [2] * 10
    labels = torch.tensor([0] * 25 + [2] * 9 + [3] * 2 + [4])
    assert held_out(labels).nonzero().flatten().tolist() == [9, 19, 33, 35]
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    assert labels[shuffled][held_out(labels[shuffled])].bincount().tolist() == [2, 0, 1, 1]


def test_classes_of_one_image_leave_none_to_choose_with(config):
    images = labelled([0, 1, 2], [0, 1, 2])
    with pytest.raises(ImageSetError, match="two images"):
        choose_protocols(config, None, ["LinearProbes"], images)
    assert names(choose_protocols(config, None, ["NearestNeighbours"], images)) == ["NearestNeighbours"]


def test_intervals_are_the_middle_95_percent_of_a_bootstrap():
    """As scipy's, and as the deviation of a mean says: 1.96 of it on each side."""
    hits = 100.0 * (np.random.default_rng(0).random(2000) < 0.7)
    groups = np.zeros(2000, np.int64)
    low, high = bootstrap(mean_of_groups, hits, groups)
    expected = stats.bootstrap((hits,), np.mean, method="percentile", confidence_level=0.95, rng=1)
    assert (low, high) == pytest.approx(tuple(expected.confidence_interval), abs=0.2)
    assert high - low == pytest.approx(2 * 1.96 * hits.std() / np.sqrt(2000), rel=0.05)


def test_a_missing_library_is_named_before_any_features(config, root, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    images = read_image_sets(config)
    with pytest.raises(ImportError) as error:
        choose_protocols(config, None, None, images)
    assert error.value.name == "sklearn"
    assert names(choose_protocols(config, None, ["NearestNeighbours"], images)) == ["NearestNeighbours"]


class Disk(SimpleNamespace):
    """As much of a disk as `shutil.disk_usage` says."""


def test_the_size_of_the_features_is_said_and_refused_if_the_disk_has_less(config, root, monkeypatch, capsys):
    """24 + 9 images of 3 layers x 2 poolings and of 16 patches, 16 wide, 2 bytes each."""
    images, checkpoint = read_image_sets(config), load_checkpoint(config, str(root / "weights.pth"))
    protocols = build_protocols([dict(type="NearestNeighbours"), PROTOCOLS[3]])
    needed = (24 + 9) * (3 * 2 + 16) * 16 * 2
    monkeypatch.setattr("shutil.disk_usage", lambda _: Disk(free=needed - 1))
    with pytest.raises(UserError, match="--cache"):
        evaluate(checkpoint, images, protocols, root / "cache")
    assert not (root / "cache").exists()
    monkeypatch.setattr("shutil.disk_usage", lambda _: Disk(free=needed))
    evaluate(checkpoint, images, protocols, root / "cache")
    assert f"features: {needed / 1e9:.3g} GB to write" in capsys.readouterr().out
    written = sum(len(np.load(file).tobytes()) for file in (root / "cache").rglob("*.npy"))
    assert written == needed
    evaluate(checkpoint, images, protocols, root / "cache")
    assert "to write" not in capsys.readouterr().out


@pytest.mark.parametrize("asked", [False, True])
def test_many_patch_tokens_are_taken_only_for_who_asks(config, root, monkeypatch, capsys, asked):
    """Here many are more than the 9 images of `val` have, which LabelFree takes."""
    monkeypatch.setattr(run, "MOST_TOKENS", 9 * 16 * 16 * 2)
    images, checkpoint = read_image_sets(config), load_checkpoint(config, str(root / "weights.pth"))
    protocols = build_protocols([dict(type="LabelFree"), PROTOCOLS[3]])
    rows = evaluate(checkpoint, images, protocols, root / "cache", asked=asked)
    said = "no AttentiveProbe: its patch tokens take 0.0 GB" in capsys.readouterr().out
    assert {"attentive probe", "RankMe"} & {row.protocol for row in rows} == (
        {"attentive probe", "RankMe"} if asked else {"RankMe"}
    )
    assert said != asked
    assert len(list((root / "cache").glob("*/tokens"))) == (2 if asked else 1)


@pytest.mark.parametrize("asked", [False, True])
def test_features_beyond_a_regressions_memory_end_the_run_of_who_asks(config, root, capsys, asked):
    images, checkpoint = read_image_sets(config), load_checkpoint(config, str(root / "weights.pth"))
    protocols = build_protocols([dict(type="Regression", memory=1e-9), PROTOCOLS[0]])
    if asked:
        with pytest.raises(UserError, match="LinearProbes"):
            evaluate(checkpoint, images, protocols, root / "cache")
        assert not (root / "cache").exists()
    else:
        rows = evaluate(checkpoint, images, protocols, root / "cache", asked=False)
        assert {row.protocol for row in rows} == {"k-NN"}
        assert "no Regression: " in capsys.readouterr().out
