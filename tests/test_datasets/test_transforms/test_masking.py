"""BEiT's block-wise masks: whole rectangles, the exact budget, every patch within reach."""

import numpy as np
import pytest
from mmpretrain.registry import TRANSFORMS

from mapet_mm.datasets.transforms.masking import BlockwiseMask


def masks(count: int, **options) -> np.ndarray:
    """(count, H, W) masks of one seeded transform."""
    np.random.seed(0)
    transform = TRANSFORMS.build(dict(type="mapet_mm.BlockwiseMask", **options))
    return np.stack([transform({})["mask"] for _ in range(count)])


@pytest.mark.parametrize(("size", "budget", "smallest"), [(14, 75, 16), (14, 98, 16), (6, 14, 3), (6, 18, 3)])
def test_masks_spend_the_whole_budget_and_no_more(size, budget, smallest):
    drawn = masks(200, input_size=size, num_masking_patches=budget, min_num_patches=smallest)
    assert drawn.shape == (200, size, size)
    assert set(np.unique(drawn)) == {0, 1}
    assert (drawn.sum((1, 2)) == budget).all()
    assert len({mask.tobytes() for mask in drawn}) > 190


def test_each_block_is_a_full_rectangle_within_the_budget():
    """A block drawn on an empty grid: its bounding box is full, its area between smallest and budget."""
    np.random.seed(0)
    transform = BlockwiseMask(14, num_masking_patches=75, min_num_patches=16)
    for _ in range(300):
        mask = np.zeros((14, 14), dtype=int)
        added = transform._mask(mask, max_mask_patches=75)
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        assert mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
        assert added == mask.sum() <= 75
        # Rounded sides: a block may be a little smaller than the smallest area drawn.
        assert added >= 12
        aspect = len(rows) / len(columns)
        assert 0.2 < aspect < 5
    mask = np.ones((14, 14), dtype=int)
    mask[3, 3] = 0
    assert (transform._mask(mask, max_mask_patches=1), mask.min()) == (1, 1)  # each call masks something


def test_the_last_row_and_column_are_masked_as_often_as_the_first():
    """MMPretrain's generator never masks them."""
    share = masks(2000, input_size=14, num_masking_patches=75).mean(0)
    edges = share[0].mean(), share[-1].mean(), share[:, 0].mean(), share[:, -1].mean()
    assert max(edges) - min(edges) < 0.02
    assert min(edges) > 0.1


def test_a_seed_gives_these_masks():
    """Recorded: an oblong grid, and one of a single row, where no block fits and patches are masked alone."""
    oblong = ["0000100 0011100 0011100 0001111 0001101", "0111110 0111110 0000110 0000100 0000100"]
    drawn = masks(2, input_size=(5, 7), num_masking_patches=14, min_num_patches=3)
    assert [" ".join("".join(map(str, row)) for row in mask) for mask in drawn] == oblong
    drawn = masks(2, input_size=(1, 6), num_masking_patches=3)
    assert drawn.tolist() == [[[0, 1, 1, 0, 0, 1]], [[0, 1, 0, 0, 1, 1]]]
    assert BlockwiseMask(14, 75).min_num_patches == 16  # BEiT's


@pytest.mark.parametrize("budget", [-1, 0, 36, 37])
def test_a_budget_that_leaves_nothing_to_see_or_to_predict_is_refused(budget):
    with pytest.raises(ValueError, match=rf"{budget} is outside 1..35"):
        BlockwiseMask(6, num_masking_patches=budget)
