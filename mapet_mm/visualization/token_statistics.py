"""Statistics of a codebook's tokens: how often and how evenly they are used, and in which classes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int64
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from tqdm import tqdm

from mapet_mm.tokenizers import TokenStore
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.tables import Column, Table

BAR_COLOUR = "#2f6fb0"


class TokenUsage(NamedTuple):
    """Numbers of patches per token (V,) and, if the images have labels, per token and class (V, classes)."""

    counts: Int[np.ndarray, " vocab"]
    class_counts: Int[np.ndarray, "vocab classes"] | None = None
    shuffled_counts: Int[np.ndarray, "vocab classes"] | None = None  # by labels of other images

    @property
    def used(self) -> int:
        """Number of tokens with at least one patch."""
        return int((self.counts > 0).sum())

    @property
    def entropy(self) -> float:
        """In nats: the loss of a model that knows how frequent each token is, and sees no image."""
        shares = self.counts[self.counts > 0] / self.counts.sum()
        return float(-(shares * np.log(shares)).sum())

    @property
    def perplexity(self) -> float:
        """Exponential of the tokens' entropy: as many evenly used tokens would have this entropy."""
        return math.exp(self.entropy)

    def most_used(self, count: int) -> list[int]:
        """At most `count` tokens in use, most patches first."""
        order = np.argsort(-self.counts, kind="stable")[:count]
        return [int(token) for token in order if self.counts[token]]


def measure_usage(store: TokenStore, labels: Mapping[str, int] | None = None) -> TokenUsage:
    """Count the patches of a token store, by class, too, if `labels` gives each image's, by name.

    Images without tokens do not count, nor do images without a label if there are labels.
    """
    if labels is None:
        class_of_row = np.zeros(len(store), np.int64)
    else:
        class_of_row = np.array([labels.get(name, -1) for name in store.names])
    counts = count_by_class(store, class_of_row)
    if not counts.any():
        raise UserError(
            f"token store `{store.path}` holds no tokens yet: run `mapet-mm extract-tokens` first"
        )
    if labels is None:
        return TokenUsage(counts.sum(axis=1))
    labelled = class_of_row >= 0
    class_of_row[labelled] = np.random.default_rng(0).permutation(class_of_row[labelled])
    return TokenUsage(counts.sum(axis=1), counts, count_by_class(store, class_of_row))


def count_by_class(
    store: TokenStore, class_of_row: Int64[np.ndarray, " image"]
) -> Int64[np.ndarray, "vocab classes"]:
    """Patches of each token in the images of each class; -1 is none."""
    classes = 1 + class_of_row.max()
    counts = np.zeros(store.vocab_size * classes, np.int64)
    for rows, grids in tqdm(store.chunks(), desc="counting tokens", unit="chunk", delay=2):
        counted = class_of_row[rows] >= 0
        keys = grids[counted] * np.int64(classes) + class_of_row[rows][counted, None, None]
        counts += np.bincount(keys.ravel(), minlength=len(counts))
    return counts.reshape(store.vocab_size, classes)


def mean_purity(class_counts: Int64[np.ndarray, "vocab classes"]) -> float:
    """Mean over patches of the share (0 to 1) of their token's most frequent class."""
    return float(class_counts.max(axis=1).sum() / class_counts.sum())


def usage_table(usage: TokenUsage) -> Table:
    """The statistics of a codebook's usage."""
    vocab_size = len(usage.counts)
    rows = [
        ["tokens", f"{vocab_size:,}"],
        ["tokens in use", f"{usage.used:,} ({vocab_size - usage.used:,} dead)"],
        ["patches", f"{usage.counts.sum():,}"],
        ["perplexity", f"{usage.perplexity:,.1f}"],
        ["share of the most used token (%)", f"{100 * usage.counts.max() / usage.counts.sum():.2f}"],
    ]
    notes = ["Perplexity: the number of evenly used tokens that would be as hard to guess."]
    if usage.class_counts is not None:
        rows.append(["class purity (%)", f"{100 * mean_purity(usage.class_counts):.1f}"])
        rows.append(["class purity by chance (%)", f"{100 * mean_purity(usage.shuffled_counts):.1f}"])
        notes.append(
            "Class purity: share of a token's patches in images of its most frequent class, mean over "
            "patches; by chance: the same when each image has the label of a random other one."
        )
    return Table([Column("what"), Column("value")], rows, notes)


def draw_usage(usage: TokenUsage) -> Figure:
    """Draw the patches per token, most used first."""
    figure = Figure(figsize=(4.4, 2.4), layout="constrained")
    ranks = figure.subplots()
    used = np.sort(usage.counts[usage.counts > 0])[::-1]
    even = usage.counts.sum() / len(usage.counts)
    ranks.plot(np.arange(1, len(used) + 1), used, color=BAR_COLOUR)
    ranks.axhline(even, color="#585866", linewidth=0.8, linestyle=":")
    ranks.annotate("even use", (1, even), xytext=(2, 2), textcoords="offset points", fontsize=8)
    ranks.set(xlabel="tokens, most used first", ylabel="patches", yscale="log")
    ranks.yaxis.set_minor_formatter(NullFormatter())  # labels between powers of ten would overlap
    ranks.spines[["top", "right"]].set_visible(False)
    return figure
