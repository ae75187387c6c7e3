"""Draw a verdict: the figures of each model with their intervals, and the sentence.

`python -m mapet_mm.visualization.verdict RUN FILE` draws that of a `mapet-mm pretrain`.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mapet_mm.visualization.report import Section

RESULT_COLOUR = "#2f6fb0"
OTHER_COLOUR = "#8a8a96"
WIDTH_INCHES = 4.2  # 400 pixels of a page
LINE_INCHES = 0.27
LINE_CHARACTERS = 45  # of the sentence


def verdict_figure(verdict: Mapping[str, Any]) -> Figure:
    """A panel for each measure that has intervals: a line for each model, the pre-training's first.

    Args:
        verdict: the contents of a verdict.json, which are `Verdict.as_json()`.
    """
    measures = [measure for measure in verdict["measures"] if measure["intervals"]]
    sentence = textwrap.wrap(verdict["sentence"], LINE_CHARACTERS, break_on_hyphens=False)
    heights = [len(measure["values"]) + 2 for measure in measures]  # with the name and the axis
    inches = LINE_INCHES * (sum(heights) + len(sentence) + 1)
    figure = Figure(figsize=(WIDTH_INCHES, inches), layout="constrained")
    panels = figure.subplots(len(measures), squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for axes, measure in zip(panels, measures, strict=True):
        draw_measure(axes, measure)
    panels[-1].set_xlabel(f"bars: 95 % intervals over {verdict['num_images']:,} held-out images", fontsize=9)
    figure.suptitle("\n".join(sentence), fontsize=10.5, fontweight="bold", x=0.02, ha="left")
    return figure


def draw_measure(axes: Axes, measure: Mapping[str, Any]) -> None:
    """Draw one measure's figures as dots, with their intervals as bars."""
    models = list(measure["values"])
    for line, model in enumerate(models):
        value = measure["values"][model]
        low, high = measure["intervals"][model]
        colour = RESULT_COLOUR if line == 0 else OTHER_COLOUR
        axes.plot([low, high], [line, line], color=colour, linewidth=3, alpha=0.5, solid_capstyle="round")
        axes.plot([value], [line], "o", color=colour, markersize=6)
        axes.annotate(
            f"{value:.1f}", (value, line), (0, 5), textcoords="offset points", fontsize=9, ha="center"
        )
    axes.set_title(measure["name"], fontsize=10, loc="left")
    axes.set_yticks(range(len(models)), models, fontsize=10)
    axes.set_ylim(len(models) - 0.5, -0.8)
    axes.tick_params(axis="x", labelsize=8.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e8e8ec")
    axes.spines[["top", "right", "left"]].set_visible(False)


def verdict_section(verdict: Mapping[str, Any]) -> list[Section]:
    """The picture for a report; no section for measures without labels, which have no intervals."""
    if not any(measure["intervals"] for measure in verdict["measures"]):
        return []
    caption = (
        "Dots: accuracy of the frozen features on held-out images. Bars: 95 % intervals over these images."
    )
    return [Section("The verdict", caption, [verdict_figure(verdict)])]


if __name__ == "__main__":
    contents = json.loads(Path(sys.argv[1], "verdict.json").read_text())
    verdict_figure(contents).savefig(sys.argv[2], dpi=200, facecolor="white")
