"""Datasets, transforms and preprocessors."""

from mapet_mm.datasets.masking import BlockwiseMask
from mapet_mm.datasets.preprocessor import TokenGridDataPreprocessor
from mapet_mm.datasets.transforms import LoadTokenGrid, RandomCropTokenGrid, RandomFlipTokenGrid
from mapet_mm.datasets.two_views import TwoViewDataPreprocessor

__all__ = [
    "BlockwiseMask",
    "LoadTokenGrid",
    "RandomCropTokenGrid",
    "RandomFlipTokenGrid",
    "TokenGridDataPreprocessor",
    "TwoViewDataPreprocessor",
]
