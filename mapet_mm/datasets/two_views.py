"""Batches of images with a second view, for a tokenizer that runs inside the model."""

from __future__ import annotations

import torch
from mmpretrain.models import SelfSupDataPreprocessor, TwoNormDataPreprocessor

from mapet_mm.registry import MODELS


@MODELS.register_module()
class TwoViewDataPreprocessor(TwoNormDataPreprocessor):
    """MMPretrain's `TwoNormDataPreprocessor`, extended for extracting features with a pre-trained model.

    Outside training, images with one view are normalised and returned as `(B, 3, H, W)`, and two views as a
    list with the `shape` of the first, which MMPretrain's `FeatureExtractor` reads. Arguments are those of
    `TwoNormDataPreprocessor`.

    Raises:
        ValueError: the images of a training batch have one view only.
    """

    def forward(self, data: dict, training: bool = False) -> dict:
        """Preprocess a batch `dict(inputs=[view, view] or images, data_samples=[...])`."""
        if isinstance(data["inputs"], torch.Tensor):
            if training:
                raise ValueError("the tokenizer gets no view of the images: put MultiView in the pipeline")
            return SelfSupDataPreprocessor.forward(self, data, training)
        data = super().forward(data, training)
        return data if training else {**data, "inputs": _Views(data["inputs"])}


class _Views(list):
    @property
    def shape(self) -> torch.Size:
        return self[0].shape
