"""Recipes of stored squares train what the decoding ones train, on the same pixels."""

from pathlib import Path

import numpy as np
import pytest
import torch
from config_building import RECIPES, in_scope, label, load
from imagenet_folder import write_imagenet
from mmengine.config import Config
from mmengine.registry import DATASETS, MODELS
from mmengine.runner import Runner

from mapet_mm.datasets.samplers import seeded_loader
from mapet_mm.models.data_preprocessors.color_jitter import BatchColorJitter
from mapet_mm.tokenizers.squares import SquareLoader, store_images

STORED = [path for path in RECIPES if "-stored_" in path.stem]
TINY = next(path for path in STORED if "tiny" in path.stem)
JITTER = dict(brightness=0.4, contrast=0.4, saturation=0.4)


def decoding(path: Path) -> Path:
    return path.with_name(path.name.replace("-stored_", "_"))


def test_there_is_one_for_each_size():
    assert len(STORED) == 3


@pytest.mark.parametrize("path", STORED, ids=label)
def test_only_the_loader_and_the_place_of_the_jitter_differ(path):
    stored, decoded = load(path), load(decoding(path))
    assert stored.data_preprocessor.pop("color_jitter") == JITTER
    assert dict(type="mapet_mm.ColorJitter", **JITTER) in decoded.train_dataloader.dataset.pipeline
    for cfg in (stored, decoded):
        for name in ("dataset", "collate_fn", "num_workers"):
            cfg.train_dataloader.pop(name, None)
    assert stored.to_dict() == decoded.to_dict()


def stored_recipe(root: Path) -> Config:
    """The recipe on an ImageNet of one photograph, whose squares it has stored."""
    write_imagenet(root)
    cfg = load(TINY)
    cfg.train_dataloader.dataset.store = str(root / "tokens")
    store_images(SquareLoader.from_config(cfg))
    return cfg


def test_a_batch_has_the_pixels_and_tokens_that_decoding_gives_and_is_jittered_by_its_seeds(tmp_path):
    cfg = stored_recipe(tmp_path)
    loader = cfg.train_dataloader
    loader.update(num_workers=0, persistent_workers=False, pin_memory=False, batch_size=1)
    with in_scope(cfg):
        preprocessor = MODELS.build(cfg.data_preprocessor)
        sampler = dict(type="DefaultSampler", shuffle=True)
        (batch,) = seeded_loader(Runner.build_dataloader(loader, seed=0), sampler, seed=0)

        # What the decoding recipe gives the model of the same image, without its jitter.
        plain = load(decoding(TINY))
        pipeline = [step for step in plain.train_dataloader.dataset.pipeline if "Jitter" not in step.type]
        for step in pipeline:
            if "store" in step:
                step.store = str(tmp_path / "tokens")
        folder = dict(plain.train_dataloader.dataset, data_root=str(tmp_path), pipeline=pipeline)
        sample = DATASETS.build(folder)[0]
        decoded = dict(inputs=sample["inputs"][None], data_samples=[sample["data_samples"]])
        expected, expected_grids = MODELS.build(plain.data_preprocessor)(decoded)["inputs"]

    images, grids = preprocessor(batch, training=False)["inputs"]
    assert torch.equal(images, expected)
    assert torch.equal(grids, expected_grids)
    np.testing.assert_array_equal(grids[0].flatten(), np.arange(196))

    rgb = batch["inputs"].flip(1).float(memory_format=torch.contiguous_format)
    seeds = torch.tensor([each.draw_seed for each in batch["data_samples"]])
    jittered = BatchColorJitter(**JITTER)(rgb, seeds)
    images, _ = preprocessor(batch, training=True)["inputs"]
    assert torch.equal(images, (jittered - preprocessor.mean) / preprocessor.std)
    assert not torch.equal(images, expected)
