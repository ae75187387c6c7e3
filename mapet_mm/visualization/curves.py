"""Loss and accuracy curves of a training."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mapet_mm.visualization.report import Section
from mapet_mm.visualization.training_log import Record, read_scalars

TRAIN_COLOUR = "#2f6fb0"
VAL_COLOUR = "#d9722a"
ENTROPY_COLOUR = "#585866"
ENTROPY_LABEL = "entropy of the tokens"


class Panel(NamedTuple):
    """Contents of one plot: the axis label with its unit, and the logged keys."""

    title: str
    label: str
    train_key: str
    val_key: str


LOSS_PANEL = Panel("Pre-training loss", "cross-entropy per target (nats)", "loss", "token/cross_entropy")
PIXEL_LABEL = "squared error of hidden pixels, each patch normalised"
PIXEL_PANEL = Panel("Pre-training loss", PIXEL_LABEL, "loss", "")
PRETRAINING_PANELS = (
    LOSS_PANEL,
    Panel("Token accuracy", "targets predicted right (%)", "token_accuracy", "token/accuracy"),
)


def curve(records: Sequence[Record], key: str) -> dict[float, float]:
    """One logged value over training: its mean by epoch or, without epochs, by iteration."""
    logged: dict[float, list[float]] = defaultdict(list)
    for record in records:
        if key in record:
            logged[record.get("epoch", record.get("step"))].append(record[key])
    return {step: sum(logged[step]) / len(logged[step]) for step in sorted(logged)}


def curve_figure(panel: Panel, records: Sequence[Record], entropy: float | None = None) -> Figure:
    """Draw one panel: training and validation curves.

    Args:
        panel: what is drawn.
        records: of the training.
        entropy: of the tokens in nats, a dashed line.
    """
    unit = "epochs" if any("epoch" in record for record in records) else "iterations"
    axes = Figure(figsize=(4.4, 3.0), layout="constrained").subplots()
    axes.set_title(panel.title, fontsize=11, fontweight="bold")
    axes.set_xlabel(unit, fontsize=9)
    axes.set_ylabel(panel.label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(color="#e8e8ec")
    axes.spines[["top", "right"]].set_visible(False)
    for key, label, colour, style in (
        (panel.train_key, "training", TRAIN_COLOUR, "-"),
        (panel.val_key, "validation", VAL_COLOUR, "--"),
    ):
        drawn = curve(records, key)
        if not drawn:
            continue
        marker = "o" if len(drawn) == 1 else ""  # a line of one point would be invisible
        axes.plot(list(drawn), list(drawn.values()), style + marker, color=colour, linewidth=1.6, label=label)
    if entropy is not None:
        axes.axhline(entropy, color=ENTROPY_COLOUR, linestyle="--", linewidth=1, label=ENTROPY_LABEL)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=8, frameon=False)
    return axes.figure


def curves_section(
    work_dir: str | os.PathLike,
    panels: Sequence[Panel] = PRETRAINING_PANELS,
    entropy: float | None = None,
) -> Section:
    """Loss and token accuracy of a pre-training.

    Args:
        work_dir: of the pre-training.
        panels: what is drawn.
        entropy: of the tokens in nats (`TokenUsage.entropy`), drawn with the loss.
    """
    records = read_scalars(work_dir)
    figures = []
    for panel in panels:
        figures.append(curve_figure(panel, records, entropy if panel is LOSS_PANEL else None))
    caption = "Training: mean over each epoch."
    if LOSS_PANEL in panels:
        caption += " Validation: the same permutations every time."
    if entropy is not None:
        caption += (
            f" Grey dashes: the entropy of the tokens, {entropy:.2f} nats. It is the loss of a model that "
            "knows how frequent each token is, and sees nothing in the images."
        )
    return Section("Pre-training", caption, figures)
