"""The drawn masks are the ones that the model uses."""

import numpy as np
import pytest

from mapet_mm.models.utils.objectives import OBJECTIVES, visibility
from mapet_mm.visualization.attention_masks import attention_mask_figure, mask_codes


@pytest.mark.parametrize("name", ["mapet", "pim", "mim"])
def test_drawn_cells_are_the_visibility_of_the_model(name):
    objective = OBJECTIVES[name]
    axes = attention_mask_figure([objective], num_context=3, num_targets=4).axes[0]
    drawn = np.asarray(axes.images[0].get_array())
    np.testing.assert_array_equal(drawn > 0, visibility(objective, 3, 4).numpy())


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
    np.testing.assert_array_equal(mask_codes(OBJECTIVES["mapet"], 1, 2), expected)


def test_figure_shows_every_objective_with_its_groups():
    figure = attention_mask_figure()
    assert [axes.get_title() for axes in figure.axes] == ["MaPeT", "PIM", "MIM"]
    labels = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert labels == [list("CMT" + "CMTQ"), list("CT" + "CTQ"), list("CM" + "CM")]
