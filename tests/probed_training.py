"""A tiny pre-training with hooks that probe it, and functions run in several processes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing as mp
from mmengine.runner import Runner
from mmpretrain.structures import DataSample
from torch.utils.data import Dataset

from mapet_mm.registry import DATASETS

ARCH = dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=48)


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
    backbone = dict(type="mapet_mm.MaPeTPretrainViT", arch=ARCH, img_size=16, patch_size=4, cutting_point=5)
    runner = Runner(
        model=dict(
            type="mapet_mm.MaPeT",
            backbone=dict(drop_path_rate=0.2, **backbone),
            head=dict(type="mapet_mm.TokenPredictionHead", embed_dims=24, vocab_size=8),
            target_generator=dict(type="mapet_mm.PrecomputedTokens", vocab_size=8),
            data_preprocessor=dict(type="mapet_mm.TokenGridDataPreprocessor", mean=[128.0], std=[64.0]),
        ),
        work_dir=str(work_dir),
        train_dataloader=dict(
            loader(8),
            sampler=dict(type="DefaultSampler", shuffle=True),
            collate_fn=dict(type="default_collate"),
        ),
        train_cfg=train_cfg or dict(by_epoch=True, max_epochs=3),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=1e-3)),
        default_hooks=dict(checkpoint=None, sampler_seed=None),
        custom_hooks=hooks,
        randomness=dict(seed=3),
        default_scope="mmpretrain",
        experiment_name=str(work_dir),
    )
    runner.train()
    return runner


def in_processes(number: int, function: Callable, folder: Path) -> list:
    """Results of `function` in the processes of a group, forked: nothing of it takes a gradient."""

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        meeting = f"file://{folder}/meeting of {number}"
        torch.distributed.init_process_group("gloo", meeting, rank=rank, world_size=number)
        torch.save(function(), folder / f"result_{rank}.pt")

    mp.start_processes(run, nprocs=number, start_method="fork")
    return [torch.load(folder / f"result_{rank}.pt") for rank in range(number)]
