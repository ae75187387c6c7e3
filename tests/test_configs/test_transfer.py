"""Linear probes on Stanford Cars, Food-101 and FGVC-Aircraft, in the layouts that their publishers ship."""

from pathlib import Path

import mat4py
import pytest
from config_building import ROOT, in_scope, load
from imagenet_folder import PHOTOGRAPH
from mmengine.registry import DATASETS
from PIL import Image


def save(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(PHOTOGRAPH[:, :300]).save(path)


def write_cars(root: Path) -> None:
    """`cars_annos.mat` with 1-based classes and a flag for the test images."""
    names = [f"car_ims/{i:06d}.jpg" for i in range(4)]
    annotations = {"relative_im_path": names, "class": [1, 196, 3, 196], "test": [0, 0, 1, 1]}
    for name in names:
        save(root / name)
    mat4py.savemat(str(root / "cars_annos.mat"), {"annotations": annotations})


def write_food(root: Path) -> None:
    for split, names in (("train", ["waffles/1", "apple_pie/2"]), ("test", ["waffles/3", "waffles/4"])):
        (root / "meta").mkdir(parents=True, exist_ok=True)
        (root / "meta" / f"{split}.txt").write_text("\n".join(names))
        for name in names:
            save(root / "images" / f"{name}.jpg")


def write_aircraft(root: Path) -> None:
    for split, lines in (("trainval", ["1 707-320", "2 Yak-42"]), ("test", ["3 Yak-42", "4 F/A-18"])):
        (root / "data").mkdir(parents=True, exist_ok=True)
        (root / "data" / f"images_variant_{split}.txt").write_text("\n".join(lines))
        for line in lines:
            save(root / "data" / "images" / f"{line.split()[0]}.jpg")


SETS = [
    ("cars", write_cars, 196, [0, 195], [2, 195]),
    ("food101", write_food, 101, [100, 0], [100, 100]),
    ("aircraft", write_aircraft, 100, [0, 99], [99, 73]),
]


@pytest.mark.parametrize(("name", "write", "classes", "train", "test"), SETS, ids=[one[0] for one in SETS])
def test_probe_reads_the_data_set(name, write, classes, train, test, tmp_path):
    """Labels of both splits by value, the head's classes are the set's, and the pipelines read its photos."""
    write(tmp_path / "data")
    cfg = load(ROOT / f"configs/mapet/benchmarks/vit-base-p16_8xb128-linear-amp-coslr-50e_{name}.py")
    loaders = (cfg.train_dataloader, cfg.val_dataloader)
    with in_scope(cfg):
        splits = [DATASETS.build(dict(one.dataset, data_root=str(tmp_path / "data"))) for one in loaders]
    samples = [[dataset[i] for i in range(2)] for dataset in splits]
    assert [[one["data_samples"].gt_label.item() for one in split] for split in samples] == [train, test]
    assert {tuple(one["inputs"].shape) for split in samples for one in split} == {(3, 224, 224)}
    assert len(splits[0].CLASSES) == cfg.model.head.num_classes == classes


@pytest.mark.parametrize("name", [one[0] for one in SETS])
def test_recipe_is_that_of_the_probe_on_imagenet(name):
    """Epochs, rates and augmentation are the same; only data and classes differ."""
    folder = ROOT / "configs/mapet/benchmarks"
    recipe = "vit-base-p16_8xb128-linear-amp-coslr-50e"
    ours, imagenet = load(folder / f"{recipe}_{name}.py"), load(folder / f"{recipe}_in1k.py")
    for key in ("optim_wrapper", "param_scheduler", "train_cfg", "auto_scale_lr"):
        assert ours[key] == imagenet[key], key
    assert ours.train_dataloader.dataset.pipeline == imagenet.train_dataloader.dataset.pipeline
