"""Losses of compiled steps against eager ones: a line of JSON for each small recipe that is named.

In a process of its own: the shape checks of the tests are no part of a graph.
"""

import json
import logging
import sys

import numpy as np
import torch
from config_building import ROOT, load, optim_wrapper_of
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import PixelData
from mmpretrain.structures import DataSample
from mmseg.structures import SegDataSample
from torch._dynamo.utils import counters

from mapet_mm.datasets.transforms.masking import BlockwiseMask
from mapet_mm.engine.hooks.compile_hook import CompileHook

STEPS, IMAGES = 6, 2


def recipe(name: str) -> Config:
    """A small recipe without stochastic depth, whose draws a compiler may order in another way."""
    cfg = load(ROOT / f"configs/micro/{name}.py")
    cfg.model.backbone.update(drop_path_rate=0.0, init_cfg=None)
    if cfg.default_scope == "mmpretrain":  # a segmentor's decoder has maps of all layers
        cfg.model.backbone.arch.num_layers = 2
    cfg.model.setdefault("data_preprocessor", cfg.get("data_preprocessor"))
    init_default_scope(cfg.default_scope)
    return cfg


def sample_of(cfg: Config, rng: np.random.Generator) -> DataSample | SegDataSample:
    """Random tokens, mask and labels of an image."""
    side = cfg.model.backbone.img_size
    if cfg.default_scope == "mmseg":
        sample = SegDataSample(metainfo=dict(img_shape=(side, side)))
        sample.gt_sem_seg = PixelData(data=torch.from_numpy(rng.integers(10, size=(1, side, side))))
        return sample
    grid = side // cfg.model.backbone.patch_size
    sample = DataSample().set_gt_label(int(rng.integers(10)))
    sample.set_field(rng.integers(64, size=(grid, grid)), "token_grid")
    mask = BlockwiseMask((grid, grid), cfg.get("num_masked", 1), min_num_patches=3)
    sample.set_field(torch.as_tensor(mask({})["mask"]), "mask")
    return sample


def losses_of(cfg: Config, **compiler) -> torch.Tensor:
    """The losses of some steps, with new images in each."""
    torch.manual_seed(0)
    np.random.seed(0)
    model = MODELS.build(cfg.model).train()
    model.init_weights()
    wrapper = optim_wrapper_of(cfg, model)
    if compiler:
        CompileHook(**compiler).compile(model)
    rng = np.random.default_rng(0)
    side = cfg.model.backbone.img_size
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        images = torch.from_numpy(rng.integers(256, size=(IMAGES, 3, side, side), dtype=np.uint8))
        samples = [sample_of(cfg, rng) for _ in images]
        data = model.data_preprocessor(dict(inputs=list(images), data_samples=samples), training=True)
        loss, _ = model.parse_losses(model(**data, mode="loss"))
        wrapper.update_params(loss)
        losses.append(loss.detach())
    return torch.stack(losses)


logging.disable(logging.WARNING)
for name in sys.argv[1:]:
    cfg = recipe(name)
    eager = losses_of(cfg)
    torch._dynamo.reset()
    counters.clear()
    # As a recipe has it, which takes a backbone that is no single graph in parts.
    compiled = losses_of(cfg, where_it_pays=True, backend="aot_eager")
    graphs = counters["stats"]["unique_graphs"]
    print(json.dumps([name, graphs, eager.tolist(), compiled.tolist()]), flush=True)
