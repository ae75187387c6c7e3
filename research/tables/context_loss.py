"""Losses of the visible patches, and an encoder that sees these alone, on a third of Fashion-MNIST.

`choice` and its siblings choose learning rate, weight of the context loss and number of visible patches on
5,000 training images that no other table measures; one seed. Tokens of `choice` come from a CLIP whose
captions name the classes; those of `choice_windows` and `choice_pixels` are clusters of pixels, of windows
and of single patches, which know nothing of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lab import small
from lab.small import RATE
from lab.tables import Row, Table

ON = small.FASHION_MNIST
KCLIP_DATA = ON["dataset"]
WINDOWS_DATA = "fashion_mnist_20000_windows"
PIXELS_DATA = "fashion_mnist_20000_bootstrap0"
VISIBLE = "model.backbone.cutting_point"
NUM_PATCHES = 49
# BEiT is MMPretrain's: its head has the weight, in a recipe of its own.
BEIT_CONTEXT = "research/configs/beit-context_vit-micro_kclip_1xb32-amp-coslr.py"
REGRESSION = "research/configs/visible-regression_vit-micro_1xb32-amp-coslr.py"


def pretrained(method: str, weight: float, rate: float, share: float = 0.0, data: str = KCLIP_DATA) -> Row:
    """A pre-training of 5 epochs.

    Args:
        method: the objective.
        weight: of the context loss.
        rate: highest learning rate.
        share: of the patches that is visible, 0 for the recipe's.
        data: dataset, which decides the tokens.
    """
    name = f"{method}, W = {weight:g}, {rate:g}"
    options = {RATE: rate}
    config = small.PRETRAIN_AMP
    if method == "BEiT" and weight:
        config = BEIT_CONTEXT
        options["model.head.context_loss"] = weight
    elif weight or share:  # the recipes of the objectives have none
        options["model.context_loss"] = weight
    if share:
        name = f"{method}, {share:.0%} visible, W = {weight:g}, {rate:g}"
        options[VISIBLE] = 1 + round(share * NUM_PATCHES)
    tokenizer = None if data == KCLIP_DATA else small.GRID
    return Row(name, config, tokenizer, options=options, data=data, values=dict(method=method.lower()))


def regression(rate: float) -> Row:
    """An encoder of the visible patches that predicts CLIP's features."""
    name = f"visible-MIM on CLIP features, W = 0.5, {rate:g}"
    return Row(name, REGRESSION, tokenizer="", options={RATE: rate}, data=KCLIP_DATA)


def mae(rate: float) -> Row:
    """MAE, which predicts pixels."""
    return Row(f"MAE, {rate:g}", small.MAE, tokenizer="", options={RATE: rate}, data=KCLIP_DATA)


RULE = "Seed 0 only. The rule: the highest mean of the last three figures."
# Without a context loss, the rates that were chosen before. With W = 0.5, that rate and a neighbour to which
# the first figures point; the other weights at the better of the two.
CHOICE = Table(
    title="Weights and rates of the context loss, on held-out training images",
    rows=[
        pretrained("MIM", 0.0, 12e-3),
        pretrained("MIM", 0.25, 24e-3),
        pretrained("MIM", 0.5, 12e-3),
        pretrained("MIM", 0.5, 24e-3),
        pretrained("MIM", 1.0, 24e-3),
        pretrained("PIM", 0.0, 12e-3),
        pretrained("PIM", 0.5, 12e-3),
        pretrained("PIM", 0.5, 24e-3),
        pretrained("MaPeT", 0.0, 48e-3),
        pretrained("MaPeT", 0.25, 48e-3),
        pretrained("MaPeT", 0.5, 24e-3),
        pretrained("MaPeT", 0.5, 48e-3),
        pretrained("MaPeT", 1.0, 48e-3),
        pretrained("BEiT", 0.0, 6e-3),
        pretrained("BEiT", 0.5, 6e-3),
        pretrained("BEiT", 0.5, 12e-3),
        pretrained("visible-MIM", 0.5, 12e-3, share=0.25),
        pretrained("visible-MIM", 0.5, 24e-3, share=0.25),
        pretrained("visible-MIM", 0.0, 12e-3, share=0.5),
        pretrained("visible-MIM", 0.25, 12e-3, share=0.5),
        pretrained("visible-MIM", 0.5, 6e-3, share=0.5),
        pretrained("visible-MIM", 0.5, 12e-3, share=0.5),
        pretrained("visible-MIM", 0.5, 24e-3, share=0.5),
        pretrained("visible-MIM", 1.0, 12e-3, share=0.5),
        pretrained("visible-MaPeT", 0.5, 12e-3, share=0.5),
        pretrained("visible-MaPeT", 0.5, 24e-3, share=0.5),
        regression(6e-3),
        regression(12e-3),
        regression(24e-3),
        regression(48e-3),
        mae(0.75e-3),
        mae(1.5e-3),
        mae(3e-3),
        mae(6e-3),
    ],
    columns=[small.TERAFLOPS, *small.KNN_COLUMNS, *small.FROZEN_COLUMNS[:3]],
    notes=[small.FROZEN_NOTE, RULE],
    **{**ON, "dataset": "fashion_mnist_20000_held_out"},
)
CHOICE_WINDOWS = replace(
    CHOICE,
    title="Weights and rates of the context loss, tokens by k-means of windows, on held-out training images",
    rows=[
        pretrained("MIM", 0.0, 12e-3, data=WINDOWS_DATA),
        pretrained("MIM", 0.0, 24e-3, data=WINDOWS_DATA),
        pretrained("MIM", 0.5, 12e-3, data=WINDOWS_DATA),
        pretrained("MIM", 0.5, 24e-3, data=WINDOWS_DATA),
        pretrained("MaPeT", 0.0, 24e-3, data=WINDOWS_DATA),
        pretrained("MaPeT", 0.0, 48e-3, data=WINDOWS_DATA),
        pretrained("MaPeT", 0.5, 24e-3, data=WINDOWS_DATA),
        pretrained("MaPeT", 0.5, 48e-3, data=WINDOWS_DATA),
        pretrained("visible-MIM", 0.0, 12e-3, share=0.25, data=WINDOWS_DATA),
        pretrained("visible-MIM", 0.5, 12e-3, share=0.25, data=WINDOWS_DATA),
        pretrained("visible-MIM", 0.5, 24e-3, share=0.25, data=WINDOWS_DATA),
        pretrained("visible-MIM", 0.5, 12e-3, share=0.5, data=WINDOWS_DATA),
        pretrained("visible-MIM", 0.5, 24e-3, share=0.5, data=WINDOWS_DATA),
    ],
)
# Where a token is a function of its patch's own pixels.
CHOICE_PIXELS = replace(
    CHOICE,
    title="Weights of the context loss, tokens by k-means of single patches, on held-out training images",
    rows=[
        pretrained("MIM", 0.0, 12e-3, data=PIXELS_DATA),
        pretrained("visible-MIM", 0.0, 12e-3, share=0.5, data=PIXELS_DATA),
        pretrained("visible-MIM", 0.5, 12e-3, share=0.5, data=PIXELS_DATA),
    ],
)


def measured(name: str, row: Row, epochs: int) -> Row:
    """A chosen row for so many epochs; each seed draws its own tokenizer."""
    data = small.OWN_TOKENS if row.data == KCLIP_DATA else f"{row.data}{{seed}}"
    options = {**row.options, **small.of_length(epochs)}
    return replace(row, name=f"{name}, {epochs} epochs", options=options, curve=name, data=data)


WEIGHT_NOTE = "W: weight of the context loss."
EQUAL_COMPUTE_NOTE = "Epochs: as many as cost what MaPeT's 5 do, within a tenth."
LENGTHS_NOTE = "Epochs: 5, and as many as cost what MaPeT's 5 and 10 do, within a tenth."
RATE_NOTE = (
    "Rates and weights are those of the choice tables, of other images. Each seed draws its tokenizer."
)
# What the rule chose, at 5 epochs, at as many as cost what MaPeT's 5 do, and for some at twice that.
COMPUTE = Table(
    title="Losses of the visible patches over compute, k-CLIP tokens",
    rows=[
        measured("MIM", pretrained("MIM", 0.0, 12e-3), 5),
        measured("MIM", pretrained("MIM", 0.0, 12e-3), 11),
        measured("MIM, W = 1", pretrained("MIM", 1.0, 24e-3), 5),
        measured("MIM, W = 1", pretrained("MIM", 1.0, 24e-3), 10),
        measured("PIM", pretrained("PIM", 0.0, 12e-3), 7),
        measured("PIM, W = 0.5", pretrained("PIM", 0.5, 24e-3), 7),
        measured("MaPeT", pretrained("MaPeT", 0.0, 48e-3), 5),
        measured("MaPeT", pretrained("MaPeT", 0.0, 48e-3), 10),
        measured("MaPeT, W = 1", pretrained("MaPeT", 1.0, 48e-3), 5),
        measured("BEiT", pretrained("BEiT", 0.0, 6e-3), 10),
        measured("BEiT, W = 0.5", pretrained("BEiT", 0.5, 6e-3), 9),
        measured("visible-MIM, W = 0.5", pretrained("visible-MIM", 0.5, 12e-3, share=0.5), 5),
        measured("visible-MIM, W = 0.5", pretrained("visible-MIM", 0.5, 12e-3, share=0.5), 13),
        measured("visible-MIM, W = 0.5", pretrained("visible-MIM", 0.5, 12e-3, share=0.5), 26),
        measured("visible-MIM on CLIP features, W = 0.5", regression(24e-3), 11),
        measured("MAE", mae(1.5e-3), 13),
    ],
    columns=[small.TERAFLOPS, *small.KNN_COLUMNS, *small.FROZEN_COLUMNS],
    baseline="MaPeT, 5 epochs",
    notes=[small.FROZEN_NOTE, LENGTHS_NOTE, WEIGHT_NOTE, RATE_NOTE],
    **ON,
)


def without_captions(data: str) -> list[Row]:
    """Rows of equal compute on tokens that know no captions, and MAE, which has no tokens."""
    return [
        measured("MIM", pretrained("MIM", 0.0, 12e-3, data=data), 11),
        measured("MIM, W = 0.5", pretrained("MIM", 0.5, 12e-3, data=data), 10),
        measured("MaPeT", pretrained("MaPeT", 0.0, 48e-3, data=data), 5),
        measured("MaPeT, W = 0.5", pretrained("MaPeT", 0.5, 48e-3, data=data), 5),
        measured("visible-MIM, W = 0.5", pretrained("visible-MIM", 0.5, 12e-3, share=0.5, data=data), 13),
        measured("MAE", mae(1.5e-3), 13),
    ]


WINDOWS = replace(
    COMPUTE,
    title="Losses of the visible patches at equal compute, tokens by k-means of windows",
    rows=without_captions(WINDOWS_DATA),
    notes=[small.FROZEN_NOTE, EQUAL_COMPUTE_NOTE, WEIGHT_NOTE, RATE_NOTE],
)
BOOTSTRAPPED = replace(
    WINDOWS,
    title="Losses of the visible patches at equal compute, tokens bootstrapped from those of windows",
    rows=without_captions("fashion_mnist_20000_bootstrapped"),
)


def at_rates(row: Row, rates: Sequence[float]) -> list[Row]:
    """A row at each of these rates."""
    return [replace(row, name=f"{row.name}, {rate:g}", options={**row.options, RATE: rate}) for rate in rates]


# Rates at the length that is measured: three each, and while the best is at an end, its neighbour (but for
# MaPeT with the loss). The best ones are those of `without_captions`.
MIM, MIM_LOSS, MAPET, MAPET_LOSS, VISIBLE_MIM, _ = WINDOWS.rows
CHOICE_RATES = replace(
    CHOICE,
    title="Rates at equal compute, tokens by k-means of windows, on held-out training images",
    rows=[
        *at_rates(MIM, [6e-3, 12e-3, 24e-3]),
        *at_rates(MIM_LOSS, [6e-3, 12e-3, 24e-3, 48e-3]),
        *at_rates(MAPET, [12e-3, 24e-3, 48e-3, 96e-3]),
        *at_rates(MAPET_LOSS, [12e-3, 24e-3, 48e-3]),
        *at_rates(VISIBLE_MIM, [6e-3, 12e-3, 24e-3]),
    ],
    notes=[small.FROZEN_NOTE, EQUAL_COMPUTE_NOTE, WEIGHT_NOTE, RULE],
)

# What costs as much as MaPeT's 5 epochs, by other measures than frozen features of the same images.
TRANSFER_COLUMNS = [
    replace(small.FINETUNE_600, name="fine-tuning, 600 labels"),
    # Without the paper's numbers, which are of other rows.
    replace(small.LINEAR_PROBE, metric=small.LAST_LAYER, paper={}),
    replace(small.DIGITS_FEW, name="digits, 100 labels"),
    replace(small.DIGITS_ALL, name="digits, all labels"),
]
# Rows of any of the three tables that are transferred; each table has those with its own weight of the loss.
TRANSFERRED = [
    "MIM, 11 epochs",
    "MIM, W = 1, 10 epochs",
    "MIM, W = 0.5, 10 epochs",
    "MaPeT, 5 epochs",
    "MaPeT, W = 1, 5 epochs",
    "MaPeT, W = 0.5, 5 epochs",
    "visible-MIM, W = 0.5, 13 epochs",
    "MAE, 13 epochs",
]
# What frozen features choose for MaPeT is a poor rate for its fine-tuning.
USUAL_RATE = "MaPeT at the recipes' rate"


def transferred(table: Table) -> Table:
    """Rows of a table, fine-tuned and probed, and MaPeT at the recipes' rate."""
    rows = [row for row in table.rows if row.name in TRANSFERRED]
    mapet = next(row for row in rows if row.name == table.baseline)
    rows.append(replace(mapet, name=f"{USUAL_RATE}, 5 epochs", options={RATE: 3e-3}, curve=USUAL_RATE))
    return replace(
        table,
        title=f"{table.title}: fine-tuning and linear probes",
        rows=rows,
        columns=TRANSFER_COLUMNS,
        notes=[small.LAST_LAYER_NOTE, EQUAL_COMPUTE_NOTE, WEIGHT_NOTE, RATE_NOTE],
    )


TABLES = dict(
    choice=CHOICE,
    choice_windows=CHOICE_WINDOWS,
    choice_pixels=CHOICE_PIXELS,
    choice_rates=CHOICE_RATES,
    compute=COMPUTE,
    windows=WINDOWS,
    bootstrapped=BOOTSTRAPPED,
    compute_transfer=transferred(COMPUTE),
    windows_transfer=transferred(WINDOWS),
    bootstrapped_transfer=transferred(BOOTSTRAPPED),
)
