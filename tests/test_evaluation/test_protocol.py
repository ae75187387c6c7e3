"""Protocols are chosen by config, and their rows are told apart and put into one table."""

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from frozen_features import PROTOCOLS, rows_of
from mmengine.config import Config
from scipy import stats
from sklearn.metrics import balanced_accuracy_score

from mapet_mm.evaluation import protocol as protocol_module
from mapet_mm.evaluation.checkpoints import load_checkpoint
from mapet_mm.evaluation.extraction import take_features
from mapet_mm.evaluation.image_sets import read_image_sets
from mapet_mm.evaluation.images import Data
from mapet_mm.evaluation.protocol import PROTOCOLS as PROTOCOLS_OF_SUITE
from mapet_mm.evaluation.protocol import Evaluated, build_protocol, choose_protocols
from mapet_mm.evaluation.protocols import regression
from mapet_mm.evaluation.protocols.classification import held_out
from mapet_mm.evaluation.protocols.knn import NearestNeighbours
from mapet_mm.evaluation.protocols.label_free import LabelFree
from mapet_mm.evaluation.protocols.regression import LowShot
from mapet_mm.evaluation.run import OpenFeatures, evaluate
from mapet_mm.evaluation.tables import Row, bootstrap, mean_of_groups, results_table
from mapet_mm.structures.tensor_file import TensorFile
from mapet_mm.utils.errors import UserError


def names(protocols) -> list[str]:
    return [type(protocol).__name__ for protocol in protocols]


@pytest.fixture
def images(config) -> dict:
    return read_image_sets(config)


@pytest.fixture
def choose(config, root, images):
    """Choose protocols for these images."""
    banks = OpenFeatures(load_checkpoint(config, None), images, root / "cache")

    def choose(declared=None, names=None, every=False) -> list:
        return choose_protocols(declared, names, every, images, banks)

    return choose


def test_declared_protocols_run_where_their_images_are(choose, capsys):
    declared = [*PROTOCOLS, dict(type="SegmentationByNeighbours")]
    chosen = choose(declared)
    assert names(chosen) == [one["type"] for one in PROTOCOLS]
    assert (chosen[0].k, chosen[1].rates) == (3, [0.1, 1.0])
    assert "no SegmentationByNeighbours: there are no `dense_train` images" in capsys.readouterr().out
    assert names(choose(declared, names=["LowShot"])) == ["LowShot"]
    with pytest.raises(UserError, match="SegmentationByNeighbours: there are no `dense_train` images"):
        choose(declared, names=["SegmentationByNeighbours"])
    with pytest.raises(UserError, match=r"no protocol suits these images \(train, val\)"):
        choose(declared[-1:])
    with pytest.raises(UserError, match="NearestNeighbors: one of NearestNeighbours, LowShot"):
        choose([dict(type="NearestNeighbors")])


def test_all_adds_the_others_to_the_declared_protocols(choose):
    """Each declared one with its own settings; with names it is refused."""
    chosen = choose([dict(type="NearestNeighbours", k=5)], every=True)
    assert names(chosen) == names(choose(every=True))
    assert chosen[0].k == 5
    with pytest.raises(UserError, match="--all runs all"):
        choose(names=["LowShot"], every=True)


def test_a_named_protocol_runs_as_often_as_it_is_declared(choose):
    declared = [*PROTOCOLS, dict(type="NearestNeighbours", k=5)]
    assert [one.k for one in choose(declared, names=["NearestNeighbours"])] == [3, 5]


def test_without_a_declaration_all_run_that_the_images_suit(choose, images, capsys):
    assert "LowShot" in names(choose())
    with pytest.raises(UserError, match="--protocols Nearest"):
        choose(names=["Nearest"])
    images["train"].labels = None
    capsys.readouterr()
    assert names(choose()) == ["LabelFree"]
    assert "no NearestNeighbours: the `train` images have no labels" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"LowShot: .* no labels"):  # asked for
        choose(names=["LowShot"])


def test_the_own_protocol_of_the_docs_runs(choose, config, root, images, monkeypatch, request):
    """As the page says: a module and a config that names it. Among all others, too."""
    request.addfinalizer(lambda: PROTOCOLS_OF_SUITE.module_dict.pop("MeanNorm"))
    request.addfinalizer(lambda: sys.modules.pop("my_protocols"))
    section = Path("docs/evaluation.md").read_text().partition("## Add a protocol")[2]
    module, declaration = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (root / "my_protocols.py").write_text(module)
    (root / "own.py").write_text(declaration.replace("data/photos", str(root / "data")))
    monkeypatch.syspath_prepend(root)
    model = load_checkpoint(config, None)
    rows = evaluate({"one": model}, Data(str(root / "own.py")), root / "cache")["one"]
    assert [row.name for row in rows] == ["mean norm, class token", "mean norm, mean"]
    features = take_features(model, images["val"], root / "cache")
    assert rows[1].value == pytest.approx(features.pooled("mean").norm(dim=1).mean().item())
    assert names(choose())[-1] == "MeanNorm"


def test_expensive_protocols_run_by_name_or_all(choose, capsys):
    """The others come in the order of their cost, and a line says what is left out and how to ask."""
    quick = choose()
    assert names(quick) == ["NearestNeighbours", "LowShot", "LabelFree", "Regression"]
    assert (quick[1].shots, quick[3].layers) == ((1, 2, 5, 10), 1)
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("left out")]
    assert line == (
        "left out, to be quick: LowShot (other shots), Regression (other layers), LinearProbes, "
        "AttentiveProbe; --protocols NAME or --all runs them"
    )
    (named,) = choose(names=["LowShot"])
    assert named.shots == LowShot().shots
    everything = choose(every=True)
    assert names(everything) == [*names(quick), "LinearProbes", "AttentiveProbe"]
    assert everything[3].layers is None


def test_two_rows_of_one_name_are_refused(config, root):
    """A table's column would show one of them."""
    checkpoint, images = load_checkpoint(config, None), read_image_sets(config)
    with pytest.raises(UserError, match="two results `k-NN, class token`"):
        rows_of(checkpoint, images, [build_protocol(PROTOCOLS[0])] * 2, root / "cache")


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
    (row,) = NearestNeighbours().rows_of(Evaluated(features, images, "cpu"), "mean", lambda bank: scores)
    expected = 100 * balanced_accuracy_score(images["val"].labels, scores.argmax(1))
    assert row.value == pytest.approx(expected)
    assert expected != pytest.approx(100 * (scores.argmax(1) == images["val"].labels).double().mean())
    assert row.unit == "mean per class, %"
    assert row.interval[0] < row.value < row.interval[1]


def test_rows_are_shown_and_kept_before_the_next_protocol_starts(config, root, monkeypatch):
    """So that a slow one does not hide what is known, and a failure of it loses nothing."""
    shown, kept = [], []

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(LabelFree, "rows", fail)
    model = load_checkpoint(config, None)
    names = ["NearestNeighbours", "LabelFree"]
    with pytest.raises(MemoryError):
        evaluate(
            {"one": model},
            Data(),
            root / "cache",
            names,
            show=shown.append,
            keep=lambda known: kept.append(known["one"]),
        )
    assert [row.name for row in shown] == ["k-NN, class token", "k-NN, mean", "k-NN, both"]
    assert kept == [shown]


@pytest.mark.parametrize("wrong", ["group", "protocol", "version"])
def test_what_is_wrong_with_the_second_is_found_before_anything_is_computed(config, root, wrong):
    """A group of images, a protocol that does not suit it, or another version."""
    sets = dict(folders=dict(first=str(root / "data"), second=str(root / "data")), protocols=PROTOCOLS[:1])
    models = {"one": load_checkpoint(config, None), "two": load_checkpoint(config, None)}
    if wrong == "group":
        sets["folders"]["second"] = str(root / "nowhere")
    elif wrong == "protocol":
        sets["folders"]["second"] = str(root / "few")
        sets["protocols"] = PROTOCOLS[:2]
        for image in (root / "data").glob("*/*/0.png"):
            copy = root / "few" / image.relative_to(root / "data")
            copy.parent.mkdir(parents=True)
            shutil.copy(image, copy)
    else:
        sets["version"] = 1
    Config(dict(default_scope="mmpretrain", evaluation=sets)).dump(root / "sets.py")
    with pytest.raises((UserError, FileNotFoundError)):
        evaluate(models, Data(str(root / "sets.py")), root / "cache", show=pytest.fail)
    assert not (root / "cache").exists()


def test_only_the_features_that_are_needed_are_taken(config, root):
    images, checkpoint = read_image_sets(config), load_checkpoint(config, str(root / "weights.pth"))
    rows = rows_of(checkpoint, images, [build_protocol(PROTOCOLS[0])], root / "cache")
    assert [row.setting for row in rows] == ["class token", "mean", "both"]
    assert {file.name for file in (root / "cache").rglob("*.safetensors")} == {"00000-output.safetensors"}


def test_of_several_processes_only_the_first_has_rows_and_words(config, root, monkeypatch, capsys):
    checkpoint, images = load_checkpoint(config, None), read_image_sets(config)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert rows_of(checkpoint, images, [build_protocol(PROTOCOLS[0])], root / "cache") == []
    assert len(list((root / "cache").glob("*/parts/00000-output.safetensors"))) == 2
    assert not capsys.readouterr().out


def test_held_out_images_are_every_tenth_of_each_class():
    """In a list in order, every tenth of all was of one class; few images leave one, an only one none."""
    mixed = torch.arange(200) % 10  # in file order
    assert mixed[held_out(mixed)].bincount().tolist() == [2] * 10
    labels = torch.tensor([0] * 25 + [2] * 9 + [3] * 2 + [4])
    assert held_out(labels).nonzero().flatten().tolist() == [9, 19, 33, 35]
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    assert labels[shuffled][held_out(labels[shuffled])].bincount().tolist() == [2, 0, 1, 1]


def test_classes_of_one_image_leave_none_to_choose_with(choose, images):
    for one in images.values():
        one.labels = torch.arange(len(one))
    images["val"].labels %= 3
    with pytest.raises(UserError, match=r"LinearProbes: .*two images"):
        choose(names=["LinearProbes"])


def test_whole_groups_of_held_out_images_choose():
    """A tenth of the images, in proportion to the classes; of few groups one."""
    groups = torch.arange(400) // 10
    labels = groups % 2
    chosen = held_out(labels, groups)
    assert groups[chosen].bincount()[groups[chosen].unique()].tolist() == [10] * 4
    assert labels[chosen].bincount().tolist() == [20, 20]
    for num_groups in (2, 3, 5):
        groups = torch.arange(60) % num_groups
        assert len(groups[held_out(torch.arange(60) // 30, groups)].unique()) == 1


def test_an_interval_over_groups_is_that_of_their_sums():
    """20 groups of one figure each: as wide as that of 20 images, whatever their sizes."""
    values = 100.0 * (np.random.default_rng(0).random(20) < 0.6)
    repeated = np.repeat(np.arange(20), 25)
    order = np.random.default_rng(1).permutation(500)
    whole = bootstrap(np.mean, values)
    assert bootstrap(np.mean, values[repeated][order], groups=7 * repeated[order]) == pytest.approx(whole)
    assert bootstrap(np.mean, values, groups=np.arange(20)) == whole
    sizes = np.tile([30, 1, 5, 14], 5)
    unequal = np.repeat(np.arange(20), sizes)
    of_images = bootstrap(np.mean, values[unequal], groups=unequal)
    of_sums = bootstrap(lambda own, count: (own * count).sum() / count.sum(), values, sizes)
    assert of_images == pytest.approx(of_sums)
    low, high = bootstrap(np.mean, values[repeated])
    assert high - low < (whole[1] - whole[0]) / 3


def test_intervals_are_the_middle_95_percent_of_a_bootstrap():
    """As scipy's, and as the deviation of a mean says: 1.96 of it on each side."""
    hits = 100.0 * (np.random.default_rng(0).random(2000) < 0.7)
    groups = np.zeros(2000, np.int64)
    low, high = bootstrap(mean_of_groups, hits, groups)
    expected = stats.bootstrap((hits,), np.mean, method="percentile", confidence_level=0.95, rng=1)
    assert (low, high) == pytest.approx(tuple(expected.confidence_interval), abs=0.2)
    assert high - low == pytest.approx(2 * 1.96 * hits.std() / np.sqrt(2000), rel=0.05)


def test_a_missing_library_is_named_before_any_features(choose, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError) as error:
        choose(PROTOCOLS)
    assert error.value.name == "sklearn"
    assert names(choose(names=["NearestNeighbours"])) == ["NearestNeighbours"]


class Disk(SimpleNamespace):
    """As much of a disk as `shutil.disk_usage` says."""


def test_the_size_of_the_features_is_said_and_refused_if_the_disk_has_less(config, root, monkeypatch, capsys):
    """24 + 9 images of 2 poolings and of 16 patches, 16 wide, 2 bytes each."""
    images, checkpoint = read_image_sets(config), load_checkpoint(config, str(root / "weights.pth"))
    protocols = [build_protocol(one) for one in (dict(type="NearestNeighbours"), PROTOCOLS[3])]
    needed = (24 + 9) * (2 + 16) * 16 * 2
    monkeypatch.setattr("shutil.disk_usage", lambda _: Disk(free=needed - 1))
    with pytest.raises(UserError, match="--cache"):
        rows_of(checkpoint, images, protocols, root / "cache")
    assert not (root / "cache").exists()
    monkeypatch.setattr("shutil.disk_usage", lambda _: Disk(free=needed))
    rows_of(checkpoint, images, protocols, root / "cache")
    assert f"features: {needed / 1e9:.3g} GB to write" in capsys.readouterr().out
    files = (root / "cache").rglob("*.safetensors")
    written = sum(TensorFile(file).rows("features").nbytes for file in files)
    assert written == needed
    rows_of(checkpoint, images, protocols, root / "cache")
    assert "to write" not in capsys.readouterr().out


def test_many_patch_tokens_are_taken_only_for_who_asks(choose, monkeypatch, capsys):
    """Here many are more than the 9 images of `val` have, which LabelFree takes."""
    monkeypatch.setattr(protocol_module, "MOST_TOKENS", 9 * 16 * 16 * 2)
    chosen = names(choose(every=True))
    assert "LabelFree" in chosen
    assert "AttentiveProbe" not in chosen
    assert "no AttentiveProbe: its patch tokens take 0.0 GB" in capsys.readouterr().out
    assert names(choose(names=["AttentiveProbe"])) == ["AttentiveProbe"]


def test_features_beyond_a_regressions_memory_end_the_run_of_who_asks(choose, monkeypatch, capsys):
    with pytest.raises(UserError, match=r"Regression: .*LinearProbes"):
        choose([dict(type="Regression", memory=1e-9)])
    monkeypatch.setattr(regression, "GIB", 1e-9)
    assert "Regression" not in names(choose())
    assert "no Regression: " in capsys.readouterr().out
