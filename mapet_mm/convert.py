"""Convert weights between libraries; see `mapet_mm.interop.convert`."""

from mapet_mm.interop.convert import (
    hf_to_mm,
    mm_to_hf,
    mm_to_reference,
    mm_to_timm,
    mm_to_torchvision,
    reference_to_mm,
    timm_to_mm,
)

__all__ = [
    "hf_to_mm",
    "mm_to_hf",
    "mm_to_reference",
    "mm_to_timm",
    "mm_to_torchvision",
    "reference_to_mm",
    "timm_to_mm",
]
