"""Batches on the model's device: images alone, with token grids, with a second view, or with labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from mmpretrain import models as mmpretrain_parts
from mmpretrain.models import TwoNormDataPreprocessor
from mmpretrain.structures import DataSample
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mapet_mm.models.data_preprocessors.color_jitter import BatchColorJitter
from mapet_mm.registry import MODELS
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.splitmix import DRAW_SEED

LOAD_TOKENS = "put LoadTokenGrid in the pipeline and algorithm_keys=['token_grid'] in its PackInputs"


class PixelRangeError(UserError, ValueError):
    """Images and the numbers that normalise them have different ranges."""


class PixelRange:
    """Looks at the first images before they are normalised; they stand for all.

    Reading values waits for the device, so others are not looked at.
    """

    def __init__(self) -> None:
        self.is_known = False

    def check(self, images: Tensor, preprocessor: nn.Module, prefix: str = "") -> None:
        """Refuse images from 0 to 1 with a `mean` for 0 to 255, and the other way round.

        Either runs, and learns badly: all pixels look nearly the same, or are hundreds of deviations off.
        Mean and `std` are the preprocessor's; `prefix` is "second_" for the second view's.
        """
        mean = getattr(preprocessor, f"{prefix}mean", None)
        std = getattr(preprocessor, f"{prefix}std", None)
        if self.is_known or mean is None or std is None or not images.numel():
            return
        self.is_known = True
        low = images.min().item()
        high = images.max().item()
        if images.is_floating_point() and low >= 0 and 0 < high <= 1 and mean.max() > 2:
            raise PixelRangeError("the images have values from 0 to 1, and the `mean` is for 0 to 255")
        if high > 2 and std.max() < 1:
            raise PixelRangeError(f"the images have values up to {high:g}, and the `std` is for 0 to 1")


@MODELS.register_module()
class SelfSupDataPreprocessor(mmpretrain_parts.SelfSupDataPreprocessor):
    """MMPretrain's preprocessor of images, for any number of bands, with which the host waits for no GPU.

    Images go to the model's device in one asynchronous copy, and are jittered there.

    Args:
        mean: of red, green and blue, or of each band of images with any number of bands.
        std: the same, of their standard deviation.
        color_jitter: `dict(brightness=0.4, contrast=0.4, saturation=0.4)`: jitter the images of a training
            batch on the model's device, each by the seed that `EpochSeedHook` gives it. It takes the place of
            `ColorJitter` in the pipeline. Images have to be RGB after `to_rgb` and its like; of other bands
            there is no saturation. None: no jitter.
        **kwargs: arguments of MMPretrain's `SelfSupDataPreprocessor`.

    Raises:
        ValueError: images for the jitter are not uint8.
        PixelRangeError: the first images do not have the range of `mean` and `std`.

    Examples:
        >>> preprocessor = SelfSupDataPreprocessor(mean=[127.5] * 4, std=[127.5] * 4)
        >>> preprocessor(dict(inputs=torch.full((1, 4, 32, 32), 255)), training=True)["inputs"].max()
        tensor(1.)
    """

    def __init__(
        self,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        *args: Any,
        color_jitter: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if mean is None or len(mean) in (1, 3):
            super().__init__(mean, std, *args, **kwargs)
        else:  # MMEngine's takes no other numbers
            super().__init__(None, None, *args, **kwargs)
            self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), False)
            self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), False)
        self.color_jitter = BatchColorJitter(**color_jitter) if color_jitter else None
        self.pixel_range = PixelRange()

    def forward(self, data: dict, training: bool = False) -> dict:
        """Preprocess a batch `dict(inputs=images, data_samples=[...])`, collated in any way."""
        images = self._send(data["inputs"])
        self.pixel_range.check(images, self)
        samples = data.get("data_samples") or ()
        return {**data, "inputs": self._normalised(images, samples if training else None)}

    def _normalised(
        self, images: Tensor, jittered: Sequence[DataSample] | None
    ) -> Float[Tensor, "batch channel height width"]:
        """The images in RGB, jittered by the seeds in their data samples if these are given, normalised."""
        # A flip, because an index by a list of channels waits for the device.
        if self._channel_conversion:
            images = images.flip(1)
        has_bytes = images.dtype == torch.uint8
        images = images.float(memory_format=torch.contiguous_format)  # stored images have their channels last
        if self.color_jitter is not None and jittered is not None:
            if not has_bytes:
                raise ValueError("color_jitter takes uint8 images: leave steps that normalise to the model")
            images = self.color_jitter(images, self._draw_seeds(jittered))
        return (images - self.mean) / self.std if hasattr(self, "mean") else images

    def _draw_seeds(self, samples: Sequence[DataSample]) -> Int64[Tensor, " batch"]:
        """The images' seeds on the device; where the loader gives none, PyTorch's generator does."""
        seeds = [sample.get(DRAW_SEED) for sample in samples]
        if None in seeds:
            return torch.randint(2**63 - 1, (len(seeds),), device=self.device)
        return self._send(torch.tensor(seeds))

    def _send(self, batch: Tensor | Sequence[Tensor]) -> Tensor:
        """Copy a batch, or the list of its members, to the device in one copy."""
        return send(_stacked(batch), self.device)


@MODELS.register_module()
class TokenGridDataPreprocessor(SelfSupDataPreprocessor):
    """Normalise images and return `[images (B, 3, H, W), token_grids (B, h, w) int64]`.

    MaPeT, and MMPretrain's BEiT and CAE, pass the second item to the target generator. Images, grids and, if
    samples have them, masks go to the model's device in one asynchronous copy each. Outside training, a batch
    without token grids becomes images only, as MMPretrain's `FeatureExtractor` needs them. Arguments are
    those of `SelfSupDataPreprocessor`.

    Raises:
        ValueError: a sample has no token grid, or images for the jitter are not uint8.
        PixelRangeError: the first images do not have the range of `mean` and `std`.

    Examples:
        >>> preprocessor = TokenGridDataPreprocessor(mean=[127.5] * 3, std=[127.5] * 3)
        >>> sample = DataSample(token_grid=np.zeros((2, 2), np.uint16))
        >>> batch = dict(inputs=torch.full((1, 3, 32, 32), 255), data_samples=[sample])
        >>> images, token_grids = preprocessor(batch, training=True)["inputs"]
        >>> images.max(), token_grids.shape
        (tensor(1.), torch.Size([1, 2, 2]))
    """

    def forward(self, data: dict, training: bool = False) -> dict:
        """Preprocess a batch `dict(inputs=images, data_samples=[...])`, collated in any way.

        The grids are in the samples, or together in `token_grids` `(B, h, w)`, as StoredImages gives them.
        """
        samples = data.get("data_samples") or ()
        images = self._send(data["inputs"])
        self.pixel_range.check(images, self)

        # Masks, if the samples have any.
        if samples and "mask" in samples[0]:
            masks = self._send([torch.as_tensor(sample.mask) for sample in samples])
            for sample, mask in zip(samples, masks, strict=True):
                sample.set_mask(mask)

        # The images and their grids; the samples stay as they are.
        images = self._normalised(images, samples if training else None)
        grids = grids_of(data, samples)
        if grids is not None:
            return {"inputs": [images, self._send(grids)], "data_samples": data.get("data_samples")}
        if training:
            raise ValueError(f"the batch has samples without token_grid: {LOAD_TOKENS}")
        return {**data, "inputs": images}


@MODELS.register_module()
class TwoViewDataPreprocessor(TwoNormDataPreprocessor):
    """MMPretrain's `TwoNormDataPreprocessor`, which looks at the range of the first images of both views.

    Outside training, it takes images with one view as well, and two views become a list with the `shape` of
    the first: MMPretrain's `FeatureExtractor` needs both.

    Raises:
        PixelRangeError: the first images do not have the range of the means and deviations.

    Examples:
        >>> first = dict(mean=[0.0] * 3, std=[255.0] * 3)
        >>> second = dict(second_mean=[127.5] * 3, second_std=[127.5] * 3)
        >>> preprocessor = TwoViewDataPreprocessor(**first, **second)
        >>> views = [torch.full((1, 3, 32, 32), 255), torch.zeros(1, 3, 16, 16)]
        >>> batch = dict(inputs=views, data_samples=[DataSample()])
        >>> images, second_view = preprocessor(batch, training=True)["inputs"]
        >>> images.max(), second_view.max()
        (tensor(1.), tensor(-1.))
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pixel_range = PixelRange()
        self.second_pixel_range = PixelRange()

    def forward(self, data: dict, training: bool = False) -> dict:
        """Preprocess `dict(inputs=[view, view] or images, data_samples=[...])`, collated in any way."""
        inputs = data["inputs"]
        if not training and (isinstance(inputs, Tensor) or inputs[0].ndim == 3):
            one_view = mmpretrain_parts.SelfSupDataPreprocessor
            return one_view.forward(self, {**data, "inputs": _stacked(inputs)}, training)
        # Two views: their ranges are looked at before they are normalised.
        views = [_stacked(view) for view in inputs]
        first, second = views
        self.pixel_range.check(first, self)
        self.second_pixel_range.check(second, self, "second_")
        data = super().forward({**data, "inputs": views}, training)
        return {**data, "inputs": _Views(data["inputs"])}


@MODELS.register_module()
class ClsDataPreprocessor(mmpretrain_parts.ClsDataPreprocessor):
    """MMPretrain's preprocessor of classifiers, with which the host waits for no GPU.

    Arguments and results are the same. Images, labels, and the partners that Mixup and CutMix draw are one
    asynchronous copy each, and labels become one-hot together instead of image by image.

    Examples:
        >>> preprocessor = ClsDataPreprocessor(mean=[0.0] * 3, std=[255.0] * 3, num_classes=4, to_onehot=True)
        >>> batch = dict(inputs=torch.full((1, 3, 8, 8), 255), data_samples=[DataSample().set_gt_label(2)])
        >>> preprocessor(batch, training=True)["data_samples"][0].gt_score
        tensor([0, 0, 1, 0])
    """

    def forward(self, data: dict, training: bool = False) -> dict:
        """Preprocess `dict(inputs=images, data_samples=[...])`, collated in any way."""
        samples = data.get("data_samples") or ()
        images = data["inputs"]
        if isinstance(images, Tensor):
            images = send(images, self.device)
        if not isinstance(images, Tensor) or not all(map(has_one_label, samples)):
            return super().forward({**data, "inputs": images}, training)  # padded, or with many labels
        images = super().forward({"inputs": images})["inputs"]
        if samples:
            images = self._with_labels(images, samples, training)
        return {"inputs": images, "data_samples": data.get("data_samples")}

    def _with_labels(self, images: Tensor, samples: Sequence[DataSample], training: bool) -> Tensor:
        """The images, mixed if that is wanted; the samples get their labels on the device."""
        labels = send(torch.cat([sample.gt_label for sample in samples]), self.device)  # B
        for sample, label in zip(samples, labels.split(1), strict=True):
            sample.set_gt_label(label)
        if not self.to_onehot:
            return images
        scores = F.one_hot(labels, self.num_classes or samples[0].num_classes)  # B classes
        if training and self.batch_augments is not None:
            with _PartnersOn(self.device):
                images, scores = self.batch_augments(images, scores)
        for sample, score in zip(samples, scores, strict=True):
            sample.set_gt_score(score)
        return images


class _PartnersOn(TorchFunctionMode):
    """Within this context, orders that are drawn on the host are copied to a device.

    MMPretrain's Mixup and CutMix index images there with such an order, for which the host would wait.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None):
        result = function(*args, **(kwargs or {}))
        return send(result, self.device) if function is torch.randperm else result


@MODELS.register_module(name="SegDataPreProcessor")
def build_segmentation_preprocessor(**options: Any) -> nn.Module:
    """MMSegmentation's preprocessor, with which the host waits for no GPU; arguments are the same."""
    from mapet_mm.models.data_preprocessors.segmentation import SegDataPreProcessor  # needs MMSegmentation

    return SegDataPreProcessor(**options)


def has_one_label(sample: Any) -> bool:
    """True if a sample has one label and no score, as most images to classify."""
    return (
        isinstance(sample, DataSample) and "gt_score" not in sample and len(sample.get("gt_label", ())) == 1
    )


def send(batch: Tensor, device: torch.device) -> Tensor:
    """Copy a batch to a device without waiting for it."""
    if device.type == "cuda" and batch.device.type == "cpu":
        batch = batch.pin_memory()  # only from there GPUs copy asynchronously
    return batch.to(device, non_blocking=True)


def grids_of(data: dict, samples: Sequence[DataSample]) -> Int64[Tensor, "batch height width"] | None:
    """The token grids of a batch, None if it has none; ValueError if only some images have one."""
    if data.get("token_grids") is not None:
        return data["token_grids"]
    grids = [sample.get("token_grid") for sample in samples]
    if all(grid is None for grid in grids):
        return None
    if any(grid is None for grid in grids):
        raise ValueError(f"the batch has samples without token_grid: {LOAD_TOKENS}")
    return torch.stack([torch.from_numpy(np.asarray(grid, np.int64)) for grid in grids])


def _stacked(images: Tensor | Sequence[Tensor]) -> Tensor:
    """One tensor of a batch; MMEngine's own loaders leave its images in a list."""
    return images if isinstance(images, Tensor) else torch.stack(list(images))


class _Views(list):
    @property
    def shape(self) -> torch.Size:
        return self[0].shape
