"""Pictures of features: colours tell groups of patches apart, and neighbours are the nearest images."""

import numpy as np
import pytest
import torch

from mapet_mm.visualization.features import (
    OTHER_CLASS,
    SAME_CLASS,
    nearest_images,
    neighbours_figure,
    principal_colours,
    principal_figure,
)

PICTURE = np.zeros((8, 8, 3), np.uint8)


def test_patches_of_one_kind_have_one_colour_and_the_sign_is_fixed():
    """Two images, whose left halves are of one kind and right halves of another."""
    kinds = torch.tensor([[3.0, 0, 0, 0, 0], [0, 0, 0, 0, 3.0]])
    tokens = kinds[torch.tensor([0, 0, 1, 1])].expand(2, 4, 4, 5)
    tokens = tokens + 0.01 * torch.randn(2, 4, 4, 5, generator=torch.Generator().manual_seed(0))
    colours = principal_colours(tokens)
    assert colours.shape == (2, 4, 4, 3)
    assert (colours.min(), colours.max()) == (0, 1)
    left, right = colours[..., :2, 0], colours[..., 2:, 0]
    assert abs(left.mean() - right.mean()) > 0.9
    assert max(left.std(), right.std()) < 0.05
    # Of features turned upside down, the same directions are named: colours change places.
    np.testing.assert_allclose(principal_colours(-tokens)[..., 0], 1 - colours[..., 0], atol=1e-6)


def test_neighbours_are_those_of_the_highest_cosine_without_the_image_itself():
    known = torch.tensor([[1.0, 0], [3, 0.3], [0, 1], [-1, 0]])
    images, cosines = nearest_images(known[:1], known, 2, itself=True)
    assert images.tolist() == [[1, 2]]
    assert cosines[0].tolist() == pytest.approx([1 / 1.01**0.5, 0])
    assert nearest_images(known[:1], known, 9)[0].tolist() == [[0, 1, 2, 3]]


def test_frames_say_whether_a_neighbour_is_of_the_same_class():
    figure = neighbours_figure(
        [PICTURE] * 2, [[PICTURE] * 2] * 2, torch.tensor([[0.9, 0.8], [0.7, 0.6]]), [[True, False]] * 2
    )
    cells = np.array(figure.axes).reshape(2, 3)
    for line in cells:
        frames = [axes.spines["top"].get_edgecolor() for axes in line[1:]]
        assert frames[0] != frames[1]
        assert not line[0].get_frame_on()
    assert [text.get_text() for axes in cells[0, 1:] for text in axes.texts] == ["0.90", "0.80"]
    assert SAME_CLASS != OTHER_CLASS


def test_names_of_models_are_no_formulas():
    """A file may be called `$x_$`, which a formula would be broken by."""
    figure = principal_figure([PICTURE], {"$x_$ " + "long " * 9: np.zeros((1, 4, 4, 3))})
    assert figure.axes[1].get_ylabel() == "$x_$ long long lo…"
    figure.canvas.draw()
