"""A tiny pre-training with hooks that probe it, and functions run in several processes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from forked_processes import start_together
from jittered_training import build
from mmengine.runner import Runner
from mmpretrain.structures import DataSample
from torch.utils.data import Dataset

from mapet_mm.registry import DATASETS


@DATASETS.register_module()
class TwoColours(Dataset):
    """Noise that is brighter in class 1, with token grids."""

    def __init__(
        self, number: int = 24, contrast: int = 120, labelled: bool = True, classes: tuple[str, ...] = ()
    ) -> None:
        self.number, self.contrast, self.labelled = number, contrast, labelled
        self.metainfo = dict(classes=classes)

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict:
        rng = np.random.default_rng(index)
        image = rng.integers(0, 120, (3, 16, 16)) + self.contrast * (index % 2)
        sample = DataSample(token_grid=rng.integers(0, 8, (4, 4)))
        if self.labelled:
            sample.set_gt_label(index % 2)
        return dict(inputs=torch.from_numpy(image.astype(np.uint8)), data_samples=sample)


def loader(batch_size: int = 5, **dataset) -> dict:
    """Config of a loader of `TwoColours`."""
    return dict(batch_size=batch_size, num_workers=0, dataset=dict(type="mapet_mm.TwoColours", **dataset))


PROBE = dict(
    type="mapet_mm.KNNProbeHook", train_dataloader=loader(), val_dataloader=loader(), interval=2, k=3
)


def train(work_dir: Path, hooks: list[dict], **train_cfg) -> Runner:
    """Three epochs of MaPeT, or another loop."""
    options = dict(train_cfg=train_cfg) if train_cfg else {}
    dataset = dict(type="mapet_mm.TwoColours")
    plain = dict(checkpoint=None, sampler_seed=None)
    runner = build(work_dir, batch=8, hooks=plain, dataset=dataset, custom_hooks=hooks, **options)
    runner.train()
    return runner


def in_processes(number: int, function: Callable, folder: Path) -> list:
    """Results of `function` in the processes of a group, forked: nothing of it takes a gradient."""

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        torch.save(function(), folder / f"result_{rank}.pt")

    start_together(number, work)
    return [torch.load(folder / f"result_{rank}.pt") for rank in range(number)]
