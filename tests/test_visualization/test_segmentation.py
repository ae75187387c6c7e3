"""Overlays colour exactly the labelled pixels."""

import numpy as np
import pytest

from mapet_mm.visualization.segmentation import (
    SegmentedImage,
    class_colours,
    overlay,
    segmentation_figure,
)


def test_overlay_blends_classes_and_leaves_background_and_ignored_pixels():
    image = np.full((1, 4, 3), 100, np.uint8)
    colours = np.array([[0, 0, 0], [200, 0, 100], [0, 200, 200]], np.uint8)
    blended = overlay(image, np.array([[0, 1, 2, 255]]), colours, opacity=0.5)
    assert blended.tolist() == [[[100, 100, 100], [150, 50, 100], [50, 150, 150], [100, 100, 100]]]


def test_overlay_refuses_what_does_not_fit():
    image = np.zeros((2, 2, 3), np.uint8)
    with pytest.raises(ValueError, match="must be one size"):
        overlay(image, np.zeros((2, 3), int), class_colours(3))
    with pytest.raises(ValueError, match="label 3 is past the 3 classes"):
        overlay(image, np.full((2, 2), 3), class_colours(3))


def test_class_colours_are_distinct():
    colours = class_colours(11)
    assert colours.shape == (11, 3)
    assert len({tuple(colour) for colour in colours.tolist()}) == 11


def test_figure_names_the_classes_seen_and_no_others():
    truth, prediction = np.array([[0, 1], [1, 255]]), np.array([[0, 3], [1, 0]])
    one = SegmentedImage(np.zeros((2, 2, 3), np.uint8), truth, prediction)
    figure = segmentation_figure([one, one], ["background", "zero", "one", "two"], "fine-tuned")
    assert [axes.get_title() for axes in figure.axes[:3]] == ["image", "ground truth", "fine-tuned"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["zero", "two"]
    assert len(figure.axes) == 6
    drawn = np.asarray(figure.axes[1].images[0].get_array())
    np.testing.assert_array_equal(drawn, overlay(one.image, truth, class_colours(4)))
