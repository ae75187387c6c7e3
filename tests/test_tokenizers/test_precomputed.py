"""Stored tokens as a target generator."""

import pytest
import torch

from mapet_mm.registry import MODELS


def test_grids_become_sequences_in_raster_order():
    generator = MODELS.build(dict(type="mapet_mm.PrecomputedTokens", vocab_size=12))
    tokens = generator(torch.arange(12, dtype=torch.int32).reshape(2, 2, 3))
    assert tokens.tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert tokens.dtype == torch.int64


@pytest.mark.parametrize(("ids", "found"), [([0, 12], "0 to 12"), ([-1, 3], "-1 to 3")])
def test_ids_outside_the_vocabulary_are_refused_naming_the_option(ids, found):
    generator = MODELS.build(dict(type="mapet_mm.PrecomputedTokens", vocab_size=12))
    with pytest.raises(
        ValueError, match=rf"token ids {found} are outside 0\.\.11: set `target_generator.vocab_size`"
    ):
        generator(torch.tensor([[ids]]))


def test_images_instead_of_grids_are_refused():
    generator = MODELS.build(dict(type="mapet_mm.PrecomputedTokens", vocab_size=12))
    with pytest.raises(ValueError, match=r"takes integer token grids \(B, H, W\), got torch.float32"):
        generator(torch.zeros(2, 3, 8, 8))
