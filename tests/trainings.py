"""A classifier for the tools, and a pre-training of nine steps that draws wherever one can draw."""

import json
import random
from pathlib import Path

import numpy as np
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import Runner
from mmpretrain.structures import DataSample
from torch.utils.data import Dataset

from mapet_mm.registry import DATASETS

ARCH = dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=48)
EPOCHS, IMAGES, BATCH = 3, 10, 4  # 3 steps an epoch, the last with 2 images
SEEN: list[tuple[str, int]] = []  # images that were loaded in this process


@DATASETS.register_module()
class JitteredNoise(Dataset):
    """Fixed noise images, each read with noise of all three generators on top, and token grids."""

    def __init__(self, images: int | None = None, jitter: bool = True) -> None:
        self.images, self.jitter = images, jitter

    def __len__(self) -> int:
        return self.images or IMAGES

    def __getitem__(self, index: int) -> dict:
        SEEN.append((type(index).__name__, index))
        rng = np.random.default_rng(index)
        image = rng.integers(0, 150, (3, 16, 16))
        if self.jitter:
            image = image + np.random.randint(0, 50, image.shape) + random.randint(0, 25)
            image = image + torch.randint(0, 25, image.shape).numpy()
        grid = rng.integers(0, 8, (4, 4))
        return dict(
            inputs=torch.from_numpy(image.astype(np.uint8)),
            data_samples=DataSample(metainfo=dict(img_path=str(index)), token_grid=grid),
        )


class StopAfter(Hook):
    """Ends the run after a number of steps, as a kill would: nothing is written any more."""

    priority = "VERY_LOW"

    def __init__(self, step: int) -> None:
        self.step = step

    def after_train_iter(self, runner: Runner, *args, **kwargs) -> None:
        if runner.iter + 1 == self.step:
            raise KeyboardInterrupt


class Noted(Hook):
    """Keeps the loss of each step."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = losses

    def after_train_iter(self, runner: Runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.losses.append(outputs["loss"].item())


HOOKS = dict(
    epoch_seed=dict(type="mapet_mm.EpochSeedHook"),
    portable_checkpoint=dict(type="mapet_mm.PortableCheckpointHook"),
)


def build(
    work_dir: Path,
    resume=False,
    interval=1,
    workers=0,
    batch=BATCH,
    hooks: dict = HOOKS,
    dataset: dict | None = None,
    drop_path_rate=0.3,
    val_images: int | None = None,
    val_workers: int = 0,
    seed: int | None = 3,
    **options,
) -> Runner:
    """The run of 9 steps, which writes `iter_N.pth`; entries of the config in `options` change it."""
    by_iteration = "train_cfg" in options
    endless_or_not = "InfiniteSampler" if by_iteration else "DefaultSampler"
    vit = dict(type="mapet_mm.MaPeTPretrainViT", arch=ARCH, img_size=16, patch_size=4, cutting_point=5)
    sampler_seed = dict(type="DistSamplerSeedHook")
    checkpoint = dict(type="CheckpointHook", by_epoch=False, interval=interval, max_keep_ckpts=3)
    cfg = Config(
        dict(
            model=dict(
                type="mapet_mm.MaPeT",
                backbone=dict(vit, drop_path_rate=drop_path_rate),
                head=dict(type="mapet_mm.TokenPredictionHead", embed_dims=ARCH["embed_dims"], vocab_size=8),
                target_generator=dict(type="mapet_mm.PrecomputedTokens", vocab_size=8),
                data_preprocessor=dict(type="mapet_mm.TokenGridDataPreprocessor", mean=[128.0], std=[64.0]),
                train_backbone=options.get("train_backbone", "all"),
            ),
            work_dir=str(work_dir),
            train_dataloader=dict(
                batch_size=batch,
                num_workers=workers,
                persistent_workers=workers > 0,
                sampler=dict(type=options.get("sampler") or endless_or_not, shuffle=True),
                batch_sampler=options.get("batch_sampler"),
                dataset=dataset or dict(type="mapet_mm.JitteredNoise"),
                collate_fn=dict(type="default_collate"),
            ),
            train_cfg=options.get("train_cfg") or dict(by_epoch=True, max_epochs=EPOCHS),
            param_scheduler=dict(
                type="CosineAnnealingLR", T_max=EPOCHS * (1 if by_iteration else 3), by_epoch=False
            ),
            optim_wrapper={"optimizer": dict(type="AdamW", lr=1e-2), **options.get("optim_wrapper", {})},
            custom_hooks=options.get("custom_hooks"),
            launcher=options.get("launcher", "none"),
            model_wrapper_cfg=options.get("model_wrapper_cfg"),
            **_validation(val_images, val_workers),
            default_hooks=dict(dict(checkpoint=checkpoint, sampler_seed=sampler_seed), **hooks),
            randomness=dict(seed=seed, diff_rank_seed=True),
            resume=resume,
            default_scope="mmpretrain",
            experiment_name=f"{work_dir}{resume}{interval}".replace("/", "_"),
        )
    )
    return Runner.from_cfg(cfg)


def _validation(images: int | None, workers: int) -> dict:
    """Of the first images, without jitter."""
    if images is None:
        return {}
    loader = dict(
        batch_size=2,
        num_workers=workers,
        persistent_workers=workers > 0,
        sampler=dict(type="DefaultSampler", shuffle=False),
        dataset=dict(type="mapet_mm.JitteredNoise", images=images, jitter=False),
        collate_fn=dict(type="default_collate"),
    )
    evaluator = dict(type="mapet_mm.TokenAccuracy")
    return dict(val_dataloader=loader, val_evaluator=evaluator, val_cfg=dict())


def final(work_dir: Path) -> dict[str, torch.Tensor]:
    content = torch.load(work_dir / "iter_9.pth", weights_only=False)
    return {**content["state_dict"], **content.get("ema_state_dict", {})}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


# A classifier of MMPretrain, for the tools; DATA is the folder of its images.
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
