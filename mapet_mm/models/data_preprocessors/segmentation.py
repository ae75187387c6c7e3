"""MMSegmentation's preprocessor, with which the host waits for no GPU; imported where it is built."""

from collections.abc import Sequence
from typing import Any

import torch
from mmseg.models import SegDataPreProcessor as MMSegPreprocessor
from mmseg.utils import stack_batch
from torch import Tensor

from mapet_mm.models.data_preprocessors.data_preprocessor import send


class SegDataPreProcessor(MMSegPreprocessor):
    """MMSegmentation's preprocessor of segmentors: arguments and results are the same.

    The crops of a training batch, which have one size, are one asynchronous copy, as are their labels, and
    are normalised together. Other batches go MMSegmentation's way.
    """

    def __init__(
        self,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        *args: Any,
        bgr_to_rgb: bool = False,
        rgb_to_bgr: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(mean, std, *args, bgr_to_rgb=bgr_to_rgb, rgb_to_bgr=rgb_to_bgr, **kwargs)
        # MMSegmentation 1.2 has these under other names than 1.4.
        self._turns_bands = bgr_to_rgb or rgb_to_bgr
        self._normalises = mean is not None

    def forward(self, data: dict, training: bool = False) -> dict[str, Any]:
        """Preprocess `dict(inputs=[image, ...], data_samples=[...])`."""
        images = data["inputs"]
        samples = data.get("data_samples") or ()
        if not training or not are_crops(images, samples):
            return super().forward(data, training)
        labels = send(torch.stack([sample.gt_sem_seg.data for sample in samples]), self.device)  # B 1 H W
        for sample, label in zip(samples, labels, strict=True):
            sample.gt_sem_seg.data = label
        images = self._normalised(send(torch.stack(list(images)), self.device))
        images, samples = stack_batch(
            list(images),
            samples,
            size=self.size,
            size_divisor=self.size_divisor,
            pad_val=self.pad_val,
            seg_pad_val=self.seg_pad_val,
        )
        if self.batch_augments is not None:
            images, samples = self.batch_augments(images, samples)
        return {"inputs": images, "data_samples": samples}

    def _normalised(self, images: Tensor) -> Tensor:
        """Images `(B, 3, H, W)` in RGB, by mean and deviation."""
        if self._turns_bands and images.shape[1] == 3:
            images = images.flip(1)  # an index by a list of channels would wait
        images = images.float()
        return (images - self.mean) / self.std if self._normalises else images


def are_crops(images: Any, samples: Any) -> bool:
    """True if all images have one size and a label for each pixel, and nothing else to pad or copy."""
    if len({image.shape for image in images}) != 1 or len(samples) != len(images):
        return False
    return all(list(sample.keys()) == ["gt_sem_seg"] for sample in samples)
