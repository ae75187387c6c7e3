"""Precisions that are emulated give what the real ones give; tokens alone classify what they determine."""

import numpy as np
import pytest
import torch
from measure_precision import Images, Tokens, TokensAlone, emulate, rounded

from mapet_mm.models.target_generators.kclip import build_tower
from mapet_mm.tokenizers import KCLIP, grid_features

TOWER = dict(layers=[1, 1, 1, 1], width=8, image_size=64)
RANDOM = dict(type="random", seed=0)
IMAGES = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def test_tf32_has_ten_bits_after_the_point():
    values = torch.tensor([1 + 2**-10, 1 + 2**-11, 1 + 2**-12, -1 - 2**-11, 3e38])
    expected = torch.tensor([1 + 2**-10, 1 + 2**-10, 1.0, -1 - 2**-10, 3e38])
    assert torch.allclose(rounded(values, "tf32"), expected, rtol=2**-11, atol=0)
    assert torch.equal(rounded(values, "tf32")[:4], expected[:4])


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_an_emulated_precision_is_far_nearer_to_the_real_one_than_float32(precision):
    tower = build_tower(TOWER, RANDOM)
    emulate(tower, precision)
    with torch.no_grad():
        emulated = grid_features(tower, IMAGES)
    real = KCLIP(TOWER, RANDOM, precision=precision).features(IMAGES)
    full = KCLIP(TOWER, RANDOM).features(IMAGES)
    error = (full - real).abs().mean()
    assert error > 0
    assert (emulated - real).abs().mean() < error / 2
    assert abs((emulated - full).abs().mean() / error - 1) < 0.2


def test_tokens_alone_classify_what_they_determine():
    tokens = np.random.default_rng(0).integers(0, 4, (400, 3))
    images = Images({}, [], tokens[:, 1])
    alone = TokensAlone(images, images, vocab_size=4)
    assert alone.accuracy(Tokens(tokens, tokens)) == 100
    assert alone.accuracy(Tokens(tokens, np.roll(tokens, 1, axis=1))) < 50
