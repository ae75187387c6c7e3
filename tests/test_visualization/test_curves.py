"""Drawn curves are the numbers that MMEngine logged."""

import json

from mapet_mm.visualization.curves import LOSS_PANEL, PRETRAINING_PANELS, Panel, curve_figure, curves_section

RUN = [
    {"lr": 1e-3, "loss": 4.0, "epoch": 1, "step": 10},
    {"lr": 1e-3, "loss": 3.0, "epoch": 1, "step": 20},
    {"token/cross_entropy": 3.5, "step": 1},
    {"lr": 1e-3, "loss": 2.0, "epoch": 2, "step": 30},
    {"token/cross_entropy": 2.5, "step": 2},
]


def test_drawn_lines_are_the_curves():
    axes = curve_figure(PRETRAINING_PANELS[0], RUN).axes[0]
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert drawn == {
        "training": ([1, 2], [3.5, 2.0]),
        "validation": ([1, 2], [3.5, 2.5]),
    }
    assert axes.get_xlabel() == "epochs"
    assert axes.get_ylabel() == "cross-entropy per target (nats)"


def test_the_entropy_of_the_tokens_is_a_dashed_line_in_the_loss_panel_alone(tmp_path):
    """At it, a model knows how frequent the tokens are, and no more."""
    file = tmp_path / "scalars.json"
    file.write_text("\n".join(json.dumps(record) for record in RUN))
    panels = [LOSS_PANEL, Panel("Rate", "", "lr", "")]
    section = curves_section(file, panels=panels, entropy=3.25)
    loss, rate = (figure.axes[0] for figure in section.figures)
    (line,) = (line for line in loss.lines if line.get_label() == "entropy of the tokens")
    assert (set(line.get_ydata()), line.get_linestyle()) == ({3.25}, "--")
    assert [line.get_label() for line in rate.lines] == ["training"]
    assert "the entropy of the tokens, 3.25 nats" in section.caption
    assert "entropy" not in curves_section(file, panels=panels).caption
