"""A classifier of MMPretrain that trains in a second, and the tools run on it in this process."""

import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

TOOLS = Path(__file__).parents[1] / "tools"
CONFIG = """
default_scope = "mmpretrain"
arch = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32)
model = dict(
    type="ImageClassifier",
    backbone=dict(type="VisionTransformer", arch=arch, img_size=16, patch_size=4),
    head=dict(type="LinearClsHead", num_classes=2, in_channels=16, loss=dict(type="CrossEntropyLoss")),
)
data_preprocessor = dict(num_classes=2, mean=[127.5] * 3, std=[127.5] * 3)
train_dataloader = dict(
    batch_size=2,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(
        type="CustomDataset",
        data_root="DATA",
        pipeline=[dict(type="LoadImageFromFile"), dict(type="PackInputs")],
    ),
)
val_dataloader = dict(train_dataloader, sampler=dict(type="DefaultSampler", shuffle=False))
test_dataloader = val_dataloader
val_evaluator = test_evaluator = dict(type="Accuracy", topk=(1,))
optim_wrapper = dict(
    optimizer=dict(type="AdamW", lr=1e-2, weight_decay=0.05),
    constructor="mapet_mm.LayerDecayOptimWrapperConstructor",
    paramwise_cfg=dict(layer_decay_rate=0.5),
)
param_scheduler = [dict(type="CosineAnnealingLR", T_max=4, by_epoch=True)]
train_cfg = dict(by_epoch=True, max_epochs=2)
val_cfg = test_cfg = dict()
auto_scale_lr = dict(base_batch_size=1)
randomness = dict(seed=0)
default_hooks = dict(
    checkpoint=dict(type="CheckpointHook", interval=1, save_best="auto"),
    logger=dict(type="LoggerHook", interval=1),
    visualization=dict(type="VisualizationHook"),
)
visualizer = dict(type="UniversalVisualizer", vis_backends=[dict(type="LocalVisBackend")])
"""


@contextmanager
def second_of_its_own() -> Iterator[None]:
    """A run starts in a second that no earlier one had, for MMEngine tells runs apart by it: one to come."""
    _LATEST[0] = start = max(int(time.time()), _LATEST[0] + 1)
    clock = SimpleNamespace(time=lambda: float(start), strftime=time.strftime, localtime=time.localtime)
    with pytest.MonkeyPatch.context() as patch:
        for module in ("mmengine.runner.runner", "mmengine._strategy.base"):
            patch.setattr(f"{module}.time", clock)
        yield


_LATEST = [0]


def run_tool(monkeypatch, name: str, *arguments: object) -> None:
    """Run the main function of a tool, here and not in another process, which would take 10 s to start."""
    spec = importlib.util.spec_from_file_location(f"tool_{name}", TOOLS / f"{name}.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
    with second_of_its_own():
        tool.main()


def read_checkpoint(work: Path, epoch: int) -> dict:
    return torch.load(work / f"epoch_{epoch}.pth", weights_only=False, map_location="cpu")


def read_scalars(work: Path) -> list[dict]:
    """Records that the last run logged, one dict a line."""
    (path, *_) = sorted(work.glob("*/vis_data/scalars.json"), reverse=True)
    return [json.loads(line) for line in path.read_text().splitlines()]
