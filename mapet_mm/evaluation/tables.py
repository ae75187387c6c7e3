"""Figures of an evaluation: rows with their intervals, and the table of several checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, Shaped

from mapet_mm.utils.tables import Column, Table

DRAWS = 1000  # of a bootstrap
TAILS = (0.025, 0.975)  # between them lie 95 %


@dataclass(frozen=True)
class Row:
    """One figure.

    Examples:
        >>> Row("k-NN", "class token", 81.5).name
        'k-NN, class token'
    """

    protocol: str  # its name in the table: 'k-NN'
    setting: str  # the features: 'class token'
    value: float
    unit: str = "top-1, %"
    spread: float | None = None  # standard deviation over draws
    interval: tuple[float, float] | None = None  # 95 %, over images: see `bootstrap`
    note: str = ""  # the choice made: 'layer 3, rate 0.1'
    detail: bool = False  # True for a row of the JSON file only

    @property
    def name(self) -> str:
        """The name in a table's `metric` and in a log."""
        return f"{self.protocol}, {self.setting}"

    @property
    def text(self) -> str:
        """The figure, with all that is known about it."""
        return figure_text(self.value, self.spread, self.interval, self.note)


def bootstrap(
    figure: Callable[..., float],
    *values: Shaped[np.ndarray, "image ..."],
    groups: Int64[np.ndarray, " image"] | None = None,
) -> tuple[float, float]:
    """The middle 95 % of a figure over draws of as many images, with replacement (Efron's percentiles).

    Where images belong together, as a patient's, as many groups are drawn.

    Args:
        figure: of arrays with an entry for each image.
        *values: these arrays.
        groups: number of each image's group; None draws single images.
    """
    generator = np.random.default_rng(0)
    num_drawn = len(values[0])
    members = []
    if groups is not None:
        _, sizes = np.unique(groups, return_counts=True)
        members = np.split(np.argsort(groups, kind="stable"), np.cumsum(sizes)[:-1])
        num_drawn = len(members)
    found = []
    for _ in range(DRAWS):
        drawn = generator.integers(num_drawn, size=num_drawn)
        if members:
            drawn = np.concatenate([members[group] for group in drawn])
        found.append(figure(*(each[drawn] for each in values)))
    low, high = np.nanquantile(found, TAILS)
    return float(low), float(high)


def mean_of_groups(values: Shaped[np.ndarray, " image"], groups: Int64[np.ndarray, " image"]) -> float:
    """The mean over some groups, 0, 1, ..., of each one's mean value; with one group the mean."""
    sizes = np.bincount(groups)
    sums = np.bincount(groups, values)
    occurring = sizes > 0
    return float((sums[occurring] / sizes[occurring]).mean())


def results_table(results: Mapping[str, Sequence[Row]]) -> Table:
    """One column per checkpoint, one line per figure.

    Args:
        results: the rows by the checkpoint's name.
    """
    lines: dict[tuple[str, str], dict[str, str]] = {}  # in the order in which figures come first
    for name, rows in results.items():
        for row in rows:
            if not row.detail:
                lines.setdefault((row.name, row.unit), {})[name] = row.text
    columns = [Column("result"), Column("figure"), *map(Column, results)]
    return Table(columns, [[*key, *map(texts.get, results)] for key, texts in lines.items()])


def figure_text(
    value: float,
    spread: float | None = None,
    interval: tuple[float, float] | None = None,
    note: str = "",
) -> str:
    """The text of a figure.

    Examples:
        >>> figure_text(81.24, 0.31, (80.1, 82.4), "rate 0.1")
        '81.2 ± 0.3 [80.1, 82.4] (rate 0.1)'
    """
    digits = 1 if abs(value) >= 1 else 3
    text = f"{value:.{digits}f}"
    if spread is not None:
        text += f" ± {spread:.1f}"
    if interval is not None:
        low, high = interval
        text += f" [{low:.1f}, {high:.1f}]"
    if note:
        text += f" ({note})"
    return text
