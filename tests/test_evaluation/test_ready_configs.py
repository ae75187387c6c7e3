"""configs/evaluation, each run from the tool on shrunk folders of the same layout, with a model by name."""

import json
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest
from config_building import run_tool
from dense_folders import write_dense
from foreign_models import save_timm
from PIL import Image

from mapet_mm.evaluation.protocols.attentive import AttentiveProbe

CLASSES = ("n01", "n02", "n03")


def write_images(folder: Path, classes, count: int, greys=None, numbered: bool = False) -> None:
    """Random images of another grey for each class."""
    rng = np.random.default_rng(0)
    for place, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        grey = 90 * (place if greys is None else greys[place])
        for index in range(count):
            image = Image.fromarray((rng.integers(0, 60, (30, 34, 3)) + grey).astype(np.uint8))
            number = place * count + index + 1
            image.save(folder / name / (f"ILSVRC2012_val_{number:08d}.png" if numbered else f"{index}.png"))


@pytest.fixture
def evaluated(tmp_path, monkeypatch):
    """Runs the tool with a config on the folders that a test writes below `data`."""
    monkeypatch.chdir(tmp_path)
    save_timm(tmp_path / "vit")

    def run(name: str, *options: str) -> dict[str, dict]:
        arguments = ["vit", "--data", f"configs/evaluation/{name}.py", "--cache", "cache", "--out", "out"]
        run_tool(monkeypatch, "evaluate_features.py", *arguments, "--no-random", *options)
        (rows,) = json.loads(Path("out/results.json").read_text()).values()
        return {f"{row['protocol']}, {row['setting']}": row for row in rows if not row["detail"]}

    return run


@pytest.mark.slow
def test_imagenet(evaluated, capsys, monkeypatch):
    short = partialmethod(AttentiveProbe.__init__, epochs=1, least_steps=10)
    monkeypatch.setattr(AttentiveProbe, "__init__", short)
    for split, count in (("train", 20), ("val", 5)):
        write_images(Path("data/imagenet") / split, CLASSES, count)
    rows = evaluated("imagenet")
    poolings = ("class token", "mean", "both")
    expected = [f"k-NN, {one}" for one in poolings] + [f"linear (SGD), {one}, last layer" for one in poolings]
    assert list(rows) == [*expected, "attentive probe, patch tokens, last layer"]
    assert all(row["interval"][0] <= row["value"] <= row["interval"][1] for row in rows.values())
    assert "k-NN, class token" in capsys.readouterr().out


def test_imagenet_shifted(evaluated):
    """One classifier for all sets: a part of the classes, numbers, several right answers or none."""
    for split, count in (("train", 20), ("val", 5)):
        write_images(Path("data/imagenet") / split, CLASSES, count, numbered=split == "val")
    answers = [[0]] * 5 + [[0, 1]] * 5 + [[1]] * 4 + [[]]
    Path("data/imagenet/real.json").write_text(json.dumps(answers))
    write_images(Path("data/imagenet-v2"), ("0", "1", "2"), 4)
    for name in ("a", "r"):
        write_images(Path(f"data/imagenet-{name}"), ("n02", "n03"), 4, greys=(1, 2))
    write_images(Path("data/imagenet-sketch"), CLASSES, 4, greys=(0, 2, 1))
    rows = evaluated("imagenet_shifted")
    found = {name: row["value"] for name, row in rows.items() if name.startswith("k-NN, mean")}
    assert found["k-NN, mean"] == found["k-NN, mean, on v2"] == 100
    assert found["k-NN, mean, on a"] == found["k-NN, mean, on r"] == 100
    assert found["k-NN, mean, on sketch"] == pytest.approx(100 / 3)
    assert found["k-NN, mean, on real"] == pytest.approx(100 * 10 / 14)
    assert rows["linear (SGD), mean, last layer, on a"]["value"] == 100


@pytest.mark.parametrize(
    ("name", "folder"),
    [("ade20k", "ade/ADEChallengeData2016"), ("voc12", "VOCdevkit"), ("cityscapes", "cityscapes")],
)
def test_segmentation(evaluated, name, folder):
    write_dense(Path("data") / folder, name.removesuffix("12"))
    rows = evaluated(name)
    assert list(rows) == ["k-NN segmentation, patch tokens"]
    (row,) = rows.values()
    assert row["value"] > 30
    assert row["interval"][0] <= row["value"] <= row["interval"][1]


def test_transfer(evaluated):
    """Eleven folders, four of them by the mean per class, and the mean of all."""
    names = "food101 cifar10 cifar100 sun397 cars aircraft dtd pets caltech101 flowers102 cub200"
    for place, name in enumerate(names.split()):
        for split, count in (("train", 8), ("val", 3)):
            write_images(Path("data/transfer") / name / split, "abc", count, greys=(0, 1, 1 + (place % 2)))
    rows = evaluated("transfer")
    for setting in ("k-NN, class token", "linear (solved), both, last layer"):
        each = [rows[f"{setting}, {name}"]["value"] for name in names.split()]
        assert rows[f"{setting}, mean of 11 sets"]["value"] == pytest.approx(np.mean(each))
        assert len({*each}) > 1
        units = {name: rows[f"{setting}, {name}"]["unit"] for name in names.split()}
        per_class = {name for name, unit in units.items() if unit == "mean per class, %"}
        assert per_class == {"aircraft", "pets", "caltech101", "flowers102"}
