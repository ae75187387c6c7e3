"""Features of whole sets of images by the backbone of any model, each process its share."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from mmengine.dataset import DefaultSampler
from mmengine.dist import all_gather, get_dist_info
from mmengine.hooks import EMAHook
from mmengine.runner import Runner
from mmpretrain.structures import DataSample
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mapet_mm.utils.config import type_name
from mapet_mm.utils.dist import choose_dtype, unwrapped

POOLINGS = ("mean", "class token")


def evaluated_model(runner: Runner) -> nn.Module:
    """The model that a validation measures: where EMAHook averages weights, the average."""
    for hook in runner.hooks:
        if isinstance(hook, EMAHook) and getattr(hook, "evaluate_on_ema", True):  # MMPretrain's option
            return hook.ema_model.module
    return unwrapped(runner.model)


def build_loader(config: Mapping[str, Any], seed: int | None = None) -> DataLoader:
    """A loader that reads each image of a set once, in order, the processes taking turns.

    All processes read equally many, because a sharded model computes in step: where they do not divide, the
    set's first images come again at the end. `own_rows` and `all_rows` leave those out.

    Args:
        config: as for MMEngine's Runner; its sampler, if it has one, is only checked.
        seed: the run's.

    Raises:
        ValueError: a sampler other than MMEngine's `DefaultSampler`, or a set without images.
    """
    check_sampler(config)
    defaults = dict(collate_fn=dict(type="default_collate"), pin_memory=torch.cuda.is_available())
    fixed = dict(sampler=dict(type="DefaultSampler", shuffle=False, round_up=True), drop_last=False)
    loader = Runner.build_dataloader({**defaults, **config, **fixed}, seed=seed)
    if not len(loader.dataset):
        raise ValueError(f"{type(loader.dataset).__name__} has no images to take features of")
    return loader


def check_sampler(config: Mapping[str, Any]) -> None:
    """Raise ValueError if a loader's config does not read each image once."""
    kind = (config.get("sampler") or {}).get("type", DefaultSampler)
    if type_name(kind) != "DefaultSampler" or config.get("batch_sampler"):
        raise ValueError(
            f"features are taken of each image once: leave `sampler` ({type_name(kind)}) and "
            "`batch_sampler` out"
        )


def image_features(
    model: nn.Module, loader: DataLoader, pooling: str = "mean", amp: bool | None = None
) -> tuple[Float[Tensor, "image dim"], Int64[Tensor, " image"]]:
    """Features and labels of this process's images, in the loader's order.

    Args:
        model: has `extract_feat(images)`, whose last result counts, and a `data_preprocessor`.
        loader: of `build_loader`.
        pooling: see `pool`.
        amp: autocast; by default on CUDA only.

    Raises:
        ValueError: an image without a label, or with several.
    """
    device = next(model.parameters()).device
    amp = device.type == "cuda" if amp is None else amp
    features, labels = [], []
    with torch.autocast(device.type, choose_dtype(device.type) if amp else None, enabled=amp):
        for batch in loader:
            images = normalise(model.data_preprocessor, batch["inputs"], device)
            features.append(pool(model.extract_feat(images)[-1], pooling).float())
            labels += [_label(sample) for sample in batch["data_samples"]]
    return torch.cat(features), torch.tensor(labels, device=device)


def _label(sample: DataSample) -> int:
    label = sample.get("gt_label")
    if label is None or torch.as_tensor(label).numel() != 1:
        raise ValueError(
            f"image `{sample.get('img_path')}` has gt_label={label}: one label an image is needed"
        )
    return int(label)


def pool(features: Tensor, pooling: str) -> Float[Tensor, "batch dim"]:
    """Image features `(B, D)`: of tokens `(B, N, D)` the patches' mean or the class token; others as is."""
    if features.ndim == 2:
        return features
    return features[:, 0] if pooling == "class token" else features[:, 1:].mean(1)


def normalise(
    preprocessor: nn.Module, images: Tensor | Sequence[Tensor], device: torch.device | None = None
) -> Float[Tensor, "batch 3 height width"]:
    """Images as the model's data preprocessor would hand them on, whatever else it wants of a batch."""
    images = images if isinstance(images, Tensor) else torch.stack(list(images))
    mean, std = getattr(preprocessor, "mean", None), getattr(preprocessor, "std", None)
    if device is None:
        device = images.device if mean is None else mean.device
    images = images.to(device, non_blocking=True).float()
    if swaps_channels(preprocessor):
        images = images.flip(1)
    return images if mean is None else (images - mean) / std


def swaps_channels(preprocessor: nn.Module | None) -> bool:
    """Whether a data preprocessor turns BGR into RGB or back.

    MMPretrain's for classification keep that as `to_rgb`; MMEngine's, and what derives from it, as
    `_channel_conversion`; that of the original MMSegmentation as `channel_conversion`.
    """
    names = ("_channel_conversion", "channel_conversion", "to_rgb")
    return bool(next((getattr(preprocessor, name) for name in names if hasattr(preprocessor, name)), False))


def rank_me(blocks: Iterable[Float[Tensor, "row dim"]]) -> float:
    """The effective rank of features: RankMe (Garrido et al., 2023), from 1 to D; NaN if one is not finite.

    Singular values come from `X^T X`, so memory does not grow with the number of rows.

    Args:
        blocks: features, some rows at a time.
    """
    return effective_rank(sum(block.double().T @ block.double() for block in blocks))


def effective_rank(gram: Float[Tensor, "dim dim"]) -> float:
    """RankMe by `X^T X`: the exponential of the entropy of the singular values' shares; NaN if not finite."""
    if not gram.isfinite().all():
        return float("nan")
    singular = torch.linalg.eigvalsh(gram.double().cpu()).clamp(min=0).sqrt()
    return float(torch.special.entr(singular / singular.sum()).sum().exp())


def own_rows(values: Tensor, total: int) -> Tensor:
    """This process's rows without those that come again; all processes' together are `total`."""
    rank, world_size = get_dist_info()
    return values[: len(range(rank, total, world_size))]


def all_rows(values: Tensor, total: int) -> Tensor:
    """The rows of all processes in the set's order, without those that come again."""
    # The processes take turns: image i is row i // P of process i % P.
    return torch.stack(all_gather(values), dim=1).flatten(0, 1)[:total]


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, uncompiled and without gradient; modes and random generators are then as before."""
    modes = {module: module.training for module in model.modules()}
    states = random.getstate(), np.random.get_state()
    devices: Sequence[int] = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    try:
        with torch.random.fork_rng(devices), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            model.eval()
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        random.setstate(states[0])
        np.random.set_state(states[1])
