"""Losses of the visible patches, and an encoder that sees these alone, on a third of Fashion-MNIST.

`choice` chooses learning rate, weight of the context loss and number of visible patches on 5,000 training
images that no other table measures; one seed. Its tokens come from a CLIP whose captions name the classes;
those of `choice_pixels` are clusters of pixels, which know nothing of them.
"""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

from lab import small
from lab.tables import Row, Table

FASHION = runpy.run_path(str(Path(__file__).with_name("fashion_mnist.py")))
RATE = FASHION["RATE"]
WEIGHT = "model.context_loss"
VISIBLE = "model.backbone.cutting_point"
NUM_PATCHES = 49

# Rates: the one that was chosen without a context loss, and its neighbours to which the pilot pointed.
SWEPT_RATES = {
    "MIM": (6e-3, 12e-3, 24e-3),
    "PIM": (12e-3, 24e-3, 48e-3),
    "MaPeT": (24e-3, 48e-3, 72e-3),
    "visible-MIM": (6e-3, 12e-3, 24e-3),
}
WEIGHTS = (0.0, 0.25, 0.5, 1.0)
# Of the visible-only encoder: a quarter and a half of the patches; the others keep their recipes' share.
SHARES = (0.25, 0.5)


def pretrained(method: str, rate: float, weight: float, share: float | None = None) -> Row:
    """A pre-training of 5 epochs with these settings, on k-CLIP's tokens."""
    options = {RATE: rate}
    if weight or share:  # the recipes of the objectives have none
        options[WEIGHT] = weight
    name = f"{method}, W = {weight:g}, {rate:g}"
    if share is not None:
        options[VISIBLE] = 1 + round(share * NUM_PATCHES)
        name = f"{method}, {share:.0%} visible, W = {weight:g}, {rate:g}"
    return Row(
        name,
        FASHION["PRETRAIN_AMP"],
        options=options,
        data="fashion_mnist_20000",
        values=dict(method=method.lower()),
    )


SWEPT = []
for method, rates in SWEPT_RATES.items():
    for share in SHARES if method == "visible-MIM" else (None,):
        SWEPT += [pretrained(method, rate, weight, share) for weight in WEIGHTS for rate in rates]

TERAFLOPS, *FROZEN_COLUMNS = FASHION["COMPUTE"].columns
COLUMNS = [TERAFLOPS, *(column for column in FROZEN_COLUMNS if column.name != "k-NN segmentation")]
RULE = "Seed 0 only. The rule: the highest mean of the last three figures."
ON = {**FASHION["ON"], "dataset": "fashion_mnist_20000_held_out"}
CHOICE = Table(
    title="Weights and rates of the context loss, on held-out training images",
    rows=SWEPT,
    columns=COLUMNS,
    notes=[small.FROZEN_NOTE, RULE],
    **ON,
)
CHOICE_PIXELS = Table(
    title="Weights and rates of the context loss, tokens by k-means of pixels, on held-out training images",
    rows=[replace(row, tokenizer=FASHION["GRID"], data="fashion_mnist_20000_bootstrap0") for row in SWEPT],
    columns=COLUMNS,
    notes=[small.FROZEN_NOTE, RULE],
    **ON,
)

TABLES = dict(choice=CHOICE, choice_pixels=CHOICE_PIXELS)
