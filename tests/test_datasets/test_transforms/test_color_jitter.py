"""The loader's colour jitter has MMPretrain's draws and pixels."""

import numpy as np
import pytest
from mmpretrain.registry import TRANSFORMS
from skimage import data as photographs

AMOUNTS = [
    dict(brightness=0.4, contrast=0.4, saturation=0.4),
    dict(brightness=(0.2, 1.8), saturation=1.0),
    dict(contrast=0.3),
    dict(),
]


@pytest.mark.parametrize("amounts", AMOUNTS, ids=str)
def test_draws_and_pixels_are_mmpretrains(amounts):
    image = photographs.chelsea()[:64, :80, ::-1]
    own, theirs = (
        TRANSFORMS.build(dict(type=name, **amounts)) for name in ("mapet_mm.ColorJitter", "ColorJitter")
    )
    for seed in range(20):
        found = []
        for jitter in (own, theirs):
            np.random.seed(seed)
            found.append(jitter(dict(img=image.copy()))["img"])
        np.testing.assert_array_equal(*found)
    assert amounts == {} or (found[0] != image).any()
