"""Importing `mapet_mm.hub` makes the recipes models of MMPretrain, by name."""

import mmpretrain
import numpy as np
from config_building import RECIPES, ROOT, index_models, read

import mapet_mm.hub  # noqa: F401

METHODS = ("mapet", "pim", "mim", "beit", "cae")


def test_the_index_lists_every_recipe_of_mmpretrain():
    listed = {entry["Config"]: entry["Name"] for entry in index_models() if "Weights" not in entry}
    recipes = [path.relative_to(ROOT) for path in RECIPES if read(path).default_scope == "mmpretrain"]
    recipes = [path for path in recipes if path.parts[1] in METHODS]
    assert sorted(listed) == sorted(map(str, recipes))
    for path in recipes:
        prefix = "mapet_" if "benchmarks" in path.parts else ""
        assert listed[str(path)] == prefix + path.stem


def test_the_index_says_which_recipes_classify():
    """`mmpretrain.inference_model` needs it; pre-training gives features only."""
    for entry in index_models():
        tasks = [result["Task"] for result in entry.get("Results", [])]
        classifies = "benchmarks" in entry["Config"]
        assert tasks == (["Image Classification"] if classifies else []), entry["Name"]


def test_a_recipe_classifies_by_its_name():
    pixels = np.random.default_rng(0).integers(256, size=(40, 60, 3), dtype=np.uint8)
    small = dict(embed_dims=24, num_layers=1, num_heads=3, feedforward_channels=48)
    model = mmpretrain.get_model(
        "mapet_vit-tiny-p16_4xb256-amp-coslr-300e_in1k",
        backbone=dict(arch=dict(_delete_=True, **small)),
        head=dict(in_channels=24),
    )
    result = mmpretrain.inference_model(model, pixels)
    assert result["pred_scores"].shape == (1000,)
    assert isinstance(result["pred_class"], str)
