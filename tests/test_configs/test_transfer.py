"""Linear probes on Stanford Cars, Food-101 and FGVC-Aircraft are the probe on ImageNet with other data."""

import pytest
from config_building import ROOT, load
from mmengine.registry import DATASETS

FOLDER = ROOT / "configs/mapet/benchmarks"
RECIPE = "vit-base-p16_8xb128-linear-amp-coslr-50e"


@pytest.mark.parametrize(("name", "classes"), [("cars", 196), ("food101", 101), ("aircraft", 100)])
def test_recipe_is_that_of_the_probe_on_imagenet(name, classes):
    """Epochs, rates and augmentation are the same; the head has the classes of the data set."""
    ours, imagenet = load(FOLDER / f"{RECIPE}_{name}.py"), load(FOLDER / f"{RECIPE}_in1k.py")
    for key in ("optim_wrapper", "param_scheduler", "train_cfg", "auto_scale_lr"):
        assert ours[key] == imagenet[key], key
    assert ours.train_dataloader.dataset.pipeline == imagenet.train_dataloader.dataset.pipeline
    data_set = DATASETS.get(f"mmpretrain.{ours.train_dataloader.dataset.type}")
    assert len(data_set.METAINFO["classes"]) == ours.model.head.num_classes == classes
