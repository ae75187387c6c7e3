"""Stored tokens as a target generator."""

import pytest
import torch

from mapet_mm.registry import MODELS


def test_grids_become_sequences_in_raster_order():
    generator = MODELS.build(dict(type="mapet_mm.PrecomputedTokens", vocab_size=12))
    tokens = generator(torch.arange(12, dtype=torch.int32).reshape(2, 2, 3))
    assert tokens.tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert tokens.dtype == torch.int64


@pytest.mark.parametrize(("ids", "noun"), [([0, 12], "0 to 12"), ([-1, 3], "-1 to 3")])
def test_ids_outside_the_vocabulary_are_refused(ids, noun):
    generator = MODELS.build(dict(type="mapet_mm.PrecomputedTokens", vocab_size=12))
    with pytest.raises(ValueError, match=noun):
        generator(torch.tensor([[ids]]))
