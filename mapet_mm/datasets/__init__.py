"""Transforms of images with token grids, and seeds for what images draw."""

from mapet_mm.datasets.samplers import SeededDataset, SeededSampler, seed_dataloaders
from mapet_mm.datasets.transforms.masking import BlockwiseMask
from mapet_mm.datasets.transforms.token_grid import LoadTokenGrid, RandomCropTokenGrid, RandomFlipTokenGrid
