"""The picture of a verdict has its figures and intervals."""

import numpy as np
import pytest

from mapet_mm.evaluation.verdict import Gain, Measure, Verdict
from mapet_mm.visualization.verdict import verdict_figure, verdict_section

VALUES = {"this pre-training": 62.5, "its start": 40.0, "random weights": 21.5}
INTERVALS = {"this pre-training": (55.0, 70.0), "its start": (32.0, 48.0), "random weights": (15.0, 28.0)}
LABELLED = Verdict(
    "its start",
    [
        Measure("k-NN, top-1 (%)", VALUES, INTERVALS, Gain(22.5, (14.0, 31.0))),
        Measure("held-out token accuracy (%)", {"this pre-training": 30.0}),
    ],
    "Pre-training gains 22.5 points of k-NN (14.0 to 31.0) over its start.",
    num_images=144,
)


def test_each_model_is_a_dot_on_its_interval():
    (axes,) = verdict_figure(LABELLED.as_json()).axes  # a measure without intervals is not drawn
    intervals, dots = axes.lines[::2], axes.lines[1::2]
    for line, name in enumerate(VALUES):
        np.testing.assert_array_equal(intervals[line].get_xydata(), [(x, line) for x in INTERVALS[name]])
        np.testing.assert_array_equal(dots[line].get_xydata(), [(VALUES[name], line)])
    assert [label.get_text() for label in axes.get_yticklabels()] == list(VALUES)
    assert [text.get_text() for text in axes.texts] == ["62.5", "40.0", "21.5"]


def test_the_sentence_is_the_title_and_all_texts_lie_in_the_picture():
    figure = verdict_figure(LABELLED.as_json())
    figure.draw_without_rendering()
    assert figure.get_suptitle().replace("\n", " ") == LABELLED.sentence
    (axes,) = figure.axes
    width, height = figure.bbox.size
    for text in (*figure.texts, axes.title, axes.xaxis.label, *axes.texts, *axes.get_yticklabels()):
        box = text.get_window_extent()
        assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= 0, text.get_text()


@pytest.mark.parametrize(("measures", "sections"), [(LABELLED.measures, 1), (LABELLED.measures[1:], 0)])
def test_a_verdict_without_labels_has_no_picture(measures, sections):
    verdict = Verdict("its start", measures, "Weak evidence.", 144)
    assert len(verdict_section(verdict.as_json())) == sections
