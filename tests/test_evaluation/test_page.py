"""The page's pictures show what was computed."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgba

from mapet_mm.evaluation.features import MemoryFeatures
from mapet_mm.evaluation.page import (
    RIGHT,
    WRONG,
    Cell,
    FeaturePictures,
    component_colours,
    enlarge,
    neighbour_figure,
    picture_grid,
    spread,
)


def test_colours_are_components_and_mean_the_same_in_all_images():
    """The patches of each image differ from left to right, and a little at random."""
    tokens = 0.01 * torch.randn(6, 5, 5, 8, generator=torch.Generator().manual_seed(0))
    tokens[..., 3] += torch.linspace(-1, 1, 5)
    red = component_colours(tokens)[..., 0].astype(int)  # image row column
    steps = np.diff(red.mean((0, 1)))
    assert (steps > 40).all() or (steps < -40).all()
    assert np.ptp(red, axis=(0, 1)).max() < 15
    assert component_colours(tokens[..., 2:4]).shape == (6, 5, 5, 3)  # of fewer dimensions than colours


def test_neighbours_come_by_similarity_and_their_frame_says_whether_the_class_is_the_same():
    features = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.9, 0.1], [0.5, 0.5]])
    pictures = [np.full((2, 2, 3), i, np.uint8) for i in range(4)]
    figure = neighbour_figure(pictures.__getitem__, features, torch.tensor([0, 0, 1, 0]), [0])
    assert [int(axes.images[0].get_array()[0, 0, 0]) for axes in figure.axes] == [0, 2, 3, 1]
    colours = [tuple(axes.spines["left"].get_edgecolor()) for axes in figure.axes[1:]]
    assert colours == [to_rgba(WRONG), to_rgba(RIGHT), to_rgba(RIGHT)]
    assert [axes.get_xlabel() for axes in figure.axes[1:]] == ["0.99", "0.71", "0.00"]


def test_a_grid_of_oblong_pictures_keeps_their_shape():
    cell = Cell(np.zeros((10, 30, 3), np.uint8))
    figure = picture_grid([[cell] * 2, [cell]], "t" * 99)
    assert len(figure.axes) == 3
    figure.draw_without_rendering()
    width, height = figure.get_size_inches()
    for axes in figure.axes:
        box = axes.get_position()
        assert box.height * height / (box.width * width) == pytest.approx(1 / 3)
        assert 0 <= box.y0 < box.y1 <= 1
    assert len(figure.get_suptitle()) < 60


def test_enlarging_repeats_patches_and_images_are_drawn_evenly():
    assert enlarge(np.array([[1, 2]]), (2, 5)).tolist() == [[1, 1, 1, 2, 2]] * 2
    assert [spread(10, 4), spread(3, 9), spread(1, 5)] == [[0, 3, 6, 9], [0, 1, 2], [0]]


def evaluated(images: int, grid: tuple[int, int], names=("val",)) -> SimpleNamespace:
    tokens = torch.randn(images, grid[0] * grid[1], 4)
    pooled = torch.randn(1, images, 4)
    poolings = ["mean"] if tokens.numel() else ["class token"]
    known = dict(layers=["output"], poolings=poolings, grid=grid, labels=torch.arange(images) % 2)
    banks = {name: MemoryFeatures(pooled, tokens, name=name, **known) for name in names}
    picture = np.zeros((8, 12, 3), np.uint8)
    return SimpleNamespace(
        features=banks, checkpoint=SimpleNamespace(name="tiny"), picture=lambda name, index: picture
    )


@pytest.mark.parametrize(
    ("known", "counts"),
    [
        (evaluated(8, (4, 6)), [1, 1]),
        (evaluated(8, (4, 6), ("val", "dense_val")), [2, 1]),
        (evaluated(2, (4, 6)), [1]),  # no neighbours
        (evaluated(8, (0, 0)), [1]),  # neighbours alone, of vectors
    ],
)
def test_the_page_has_the_pictures_that_the_features_allow(known, counts):
    pictures = FeaturePictures(images=4)
    assert pictures.run(known) == []
    assert [len(section.figures) for section in pictures.sections(known, [])] == counts


def test_one_image_is_not_enough():
    with pytest.raises(ValueError, match="images=1"):
        FeaturePictures(images=1)
