"""Loss and accuracy curves of a training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mapet_mm.visualization.training_log import Record, places_of

TRAIN_COLOUR, VAL_COLOUR, REFERENCE_COLOUR = "#2f6fb0", "#d9722a", "#b8b8c0"


@dataclass(frozen=True)
class Curve:
    """One logged value over training: `values[i]` at `steps[i]`, where steps count `unit`s."""

    steps: list[float]
    values: list[float]
    unit: str


@dataclass(frozen=True)
class Panel:
    """Contents of one plot: the axis label with its unit, and the logged keys."""

    title: str
    label: str
    train_key: str
    val_key: str


PRETRAINING_PANELS = (
    Panel("Pre-training loss", "cross-entropy per target (nats)", "loss", "token/cross_entropy"),
    Panel("Token accuracy", "targets predicted right (%)", "token_accuracy", "token/accuracy"),
)


def curve(records: Sequence[Record], key: str) -> Curve:
    """One value over training: per epoch (mean over the epoch's logs) or, without epochs, per iteration.

    Args:
        records: what `read_scalars` returns.
        key: the logged name, such as 'loss' or 'accuracy/top1'.
    """
    by_epoch = any("epoch" in record for record in records)
    logged: dict[float, list[float]] = defaultdict(list)
    for record in records:
        if key in record:
            logged[record.get("epoch", record.get("step"))].append(record[key])
    steps = sorted(logged)
    means = [sum(logged[step]) / len(logged[step]) for step in steps]
    return Curve(steps, means, "epoch" if by_epoch else "iteration")


def curve_figure(
    panel: Panel, records: Sequence[Record], reference: Sequence[Record] | None = None
) -> Figure:
    """Draw one panel: training and validation curves, with a reference run behind them.

    Args:
        panel: what to draw.
        records: the run's records.
        reference: records of a committed run to compare with.
    """
    figure = Figure(figsize=(4.4, 3.0), layout="constrained")
    axes = figure.subplots()
    if reference is not None:
        _plot(axes, curve(reference, panel.train_key), "reference, training", REFERENCE_COLOUR, "-", 4)
        _plot(axes, curve(reference, panel.val_key), "reference, validation", REFERENCE_COLOUR, ":", 4)
    training = curve(records, panel.train_key)
    _plot(axes, training, "training", TRAIN_COLOUR, "-", 1.6)
    _plot(axes, curve(records, panel.val_key), "validation", VAL_COLOUR, "--", 1.6)
    axes.set_title(panel.title, fontsize=11, fontweight="bold")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    finish(axes, f"{training.unit}s", panel.label)
    return figure


def finish(axes: Axes, x_label: str, y_label: str) -> None:
    """Label a plot of lines, with the grid and the legend that all of them have."""
    axes.set_xlabel(x_label, fontsize=9)
    axes.set_ylabel(y_label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(color="#e8e8ec")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)


def place_figure(records: Sequence[Record]) -> Figure | None:
    """Draw token accuracy by place in the permuted order (early, middle and late steps); None if not logged.

    Args:
        records: what `read_scalars` returns of a run with `HealthHook`.
    """
    logged = [(record["step"], places) for record in records if (places := places_of(record))]
    if not logged:
        return None
    number = max(max(values) for _, values in logged)
    figure = Figure(figsize=(4.4, 3.0), layout="constrained")
    axes = figure.subplots()
    chosen = sorted({0, len(logged) // 2, len(logged) - 1})
    for index, shade in zip(chosen, ("0.8", "0.55", TRAIN_COLOUR), strict=False):
        step, values = logged[index]
        places = [(place - 0.5) / number for place in values]
        axes.plot(
            places, list(values.values()), "-o", color=shade, markersize=3, label=f"iteration {step:.0f}"
        )
    axes.set_title("Token accuracy by place", fontsize=11, fontweight="bold")
    finish(axes, "place among the targets (0 first, 1 last)", "targets predicted right (%)")
    return figure


def _plot(axes: Axes, drawn: Curve, label: str, colour: str, style: str, width: float) -> None:
    if drawn.steps:
        marker = "o" if len(drawn.steps) == 1 else None
        axes.plot(drawn.steps, drawn.values, style, color=colour, linewidth=width, label=label, marker=marker)
