"""Check a tokenizer that runs inside the model, on images that the model's data preprocessor normalises."""

from __future__ import annotations

import torch
from mmengine.registry import DefaultScope
from mmpretrain.structures import DataSample
from torch import nn

from mapet_mm.models.target_generators.grid_kmeans import GridKMeans
from mapet_mm.registry import MODELS
from mapet_mm.structures.codebook import CodebookError


def check_normalisation(model: nn.Module) -> None:
    """Compare how the tokenizer's view is normalised with how it was for the codebook, by the same pixels.

    Args:
        model: with a tokenizer as `target_generator`; all others pass, and codebooks that do not record it.

    Raises:
        CodebookError: they differ.
    """
    tokenizer = getattr(model, "target_generator", None)
    codebook = tokenizer.codebook if isinstance(tokenizer, GridKMeans) else None
    metadata = {} if codebook is None else codebook.metadata
    recorded = (metadata.get("preprocessing") or {}).get("data_preprocessor")
    if recorded is None:  # made by hand or by an early version
        return
    pixels = torch.arange(0, 240, 5, dtype=torch.uint8).reshape(1, 3, 4, 4)
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        fitted_on = MODELS.build(recorded)({"inputs": pixels, "data_samples": None})["inputs"]
    batch = {"inputs": [pixels, pixels], "data_samples": [DataSample()]}
    seen = model.data_preprocessor(batch, True)["inputs"][1].cpu()
    if not torch.allclose(seen, fitted_on, rtol=1e-3, atol=1e-3):
        settings = ", ".join(f"{key}={value}" for key, value in recorded.items() if key != "type")
        raise CodebookError(
            f"codebook {codebook.digest[:12]} of the model's tokenizer was fitted on images normalised with "
            f"{settings}, but {type(model.data_preprocessor).__name__} normalises the tokenizer's view in "
            "another way: in `data_preprocessor`, a mapet_mm.TwoViewDataPreprocessor, set `second_mean`, "
            "`second_std` and `to_rgb` accordingly"
        )
