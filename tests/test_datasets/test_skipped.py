"""The next image takes the place of each that a store skipped."""

import pytest

from mapet_mm.datasets.skipped import replace_by_neighbours


@pytest.mark.parametrize(
    ("num_images", "skipped", "order"),
    [
        (4, [], [0, 1, 2, 3]),
        (4, [1], [0, 2, 2, 3]),
        (6, [1, 2, 4], [0, 3, 3, 3, 5, 5]),
        (4, [2, 3], [0, 1, 0, 0]),
        (3, [0, 1], [2, 2, 2]),
    ],
)
def test_the_next_image_or_the_first_replaces_a_skipped_one(num_images, skipped, order):
    assert replace_by_neighbours(num_images, skipped).tolist() == order
