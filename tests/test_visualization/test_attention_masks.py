"""The drawn masks are the ones that the model uses."""

import numpy as np
import pytest

from mapet_mm.models.utils.objectives import OBJECTIVES, visibility
from mapet_mm.visualization.attention_masks import all_masks_figure, attention_mask_figure

TEXTS = {"mapet": ["MaPeT", *"CMTCMTQ"], "pim": ["PIM", *"CTCTQ"], "mim": ["MIM", *"CMCM"]}


def assert_drawn(axes, name):
    drawn = np.asarray(axes.images[0].get_array())
    np.testing.assert_array_equal(drawn > 0, visibility(OBJECTIVES[name], 3, 4).numpy())
    assert [axes.get_title(), *(text.get_text() for text in axes.texts)] == TEXTS[name]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_drawn_cells_and_groups_are_those_of_the_model(name):
    (axes,) = attention_mask_figure(OBJECTIVES[name], num_context=3, num_targets=4).axes
    assert_drawn(axes, name)


def test_the_picture_of_all_objectives_has_the_mask_of_each():
    figure = all_masks_figure(num_context=3, num_targets=4)
    for axes, name in zip(figure.axes, ["mim", "pim", "mapet"], strict=True):
        assert_drawn(axes, name)
    assert [text.get_text()[0] for text in figure.texts] == [*"CMTQ"]


def test_cells_are_coloured_by_the_key_group():
    """One context token and two targets in MaPeT, by hand: C is 1, M is 2, T is 3, unseen is 0."""
    expected = [
        [1, 2, 2, 0, 0],  # C
        [1, 2, 2, 0, 0],  # M of target 1
        [1, 2, 2, 0, 0],  # M of target 2
        [1, 0, 2, 3, 0],  # T of target 1 sees the mask token behind it and itself
        [1, 0, 0, 3, 3],  # T of target 2
        [1, 2, 2, 0, 0],  # Q of target 1 sees no content of a target
        [1, 0, 2, 3, 0],  # Q of target 2 sees its own mask token and the content of target 1
    ]
    (axes,) = attention_mask_figure(OBJECTIVES["mapet"], 1, 2).axes
    np.testing.assert_array_equal(axes.images[0].get_array(), expected)
