"""Batches of images with a second view for a tokenizer that runs in the model."""

from __future__ import annotations

import torch
from mmpretrain.models import SelfSupDataPreprocessor, TwoNormDataPreprocessor

from mapet_mm.registry import MODELS


@MODELS.register_module()
class TwoViewDataPreprocessor(TwoNormDataPreprocessor):
    """MMPretrain's `TwoNormDataPreprocessor`, with which a pre-trained model gives features too.

    Outside of training, images with one view only are normalised and handed on as `(B, 3, H, W)`, and two
    views as a list with the first one's `shape`, which MMPretrain's `FeatureExtractor` asks for. Arguments
    are those of `TwoNormDataPreprocessor`.

    Raises:
        ValueError: images of a training batch have one view.
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
