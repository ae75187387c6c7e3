"""The next image takes the place of each that a store skipped."""

import numpy as np
import pytest
from mmengine.dataset import BaseDataset

from mapet_mm.datasets.skipped import reorder, replace_by_neighbours


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


@pytest.mark.parametrize("serialize", [True, False])
def test_a_dataset_shows_its_images_in_the_new_order(serialize):
    dataset = BaseDataset(lazy_init=True, serialize_data=serialize)
    dataset.load_data_list = lambda: [dict(name="x" * (index + 1)) for index in range(6)]
    dataset.full_init()
    order = np.array([3, 3, 4, 5, 0, 0])
    reorder(dataset, order)
    assert [len(dataset.get_data_info(index)["name"]) - 1 for index in range(len(dataset))] == order.tolist()
