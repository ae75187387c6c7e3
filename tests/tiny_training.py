"""A classifier of MMPretrain that trains in a second, and what its runs leave."""

import json
from pathlib import Path

import torch

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


def read_checkpoint(work: Path, epoch: int) -> dict:
    return torch.load(work / f"epoch_{epoch}.pth", weights_only=False, map_location="cpu")


def read_scalars(work: Path) -> list[dict]:
    """Records that the last run logged, one dict a line."""
    (path, *_) = sorted(work.glob("*/vis_data/scalars.json"), reverse=True)
    return [json.loads(line) for line in path.read_text().splitlines()]
