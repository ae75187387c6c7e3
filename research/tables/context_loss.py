"""Losses of the visible patches, and an encoder that sees these alone, on a third of Fashion-MNIST.

`choice` and its siblings choose learning rate, weight of the context loss and number of visible patches on
5,000 training images that no other table measures; one seed. Tokens of `choice` come from a CLIP whose
captions name the classes; those of `choice_windows` and `choice_pixels` are clusters of pixels, of windows
and of single patches, which know nothing of them.
"""

from __future__ import annotations

import runpy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lab import small
from lab.tables import Row, Table

FASHION = runpy.run_path(str(Path(__file__).with_name("fashion_mnist.py")))
RATE = FASHION["RATE"]
GRID = FASHION["GRID"]  # tokens by k-means of a dataset's `grid_encoder`
VISIBLE = "model.backbone.cutting_point"
NUM_PATCHES = 49
# BEiT is MMPretrain's: its head has the weight, in a recipe of its own.
BEIT_CONTEXT = "research/configs/beit-context_vit-micro_kclip_1xb32-amp-coslr.py"
MAE = "research/configs/mae_vit-micro_1xb32-amp-coslr.py"
REGRESSION = "research/configs/visible-regression_vit-micro_1xb32-amp-coslr.py"


def pretrained(method: str, rate: float, weight: float, share: float | None = None) -> Row:
    """A pre-training of 5 epochs with these settings, on k-CLIP's tokens."""
    options = {RATE: rate}
    config = FASHION["PRETRAIN_AMP"]
    if method == "BEiT" and weight:
        config = BEIT_CONTEXT
        options["model.head.context_loss"] = weight
    elif weight or share:  # the recipes of the objectives have none
        options["model.context_loss"] = weight
    name = f"{method}, W = {weight:g}, {rate:g}"
    if share is not None:
        options[VISIBLE] = 1 + round(share * NUM_PATCHES)
        name = f"{method}, {share:.0%} visible, W = {weight:g}, {rate:g}"
    return Row(name, config, options=options, data="fashion_mnist_20000", values=dict(method=method.lower()))


def swept(
    method: str, rates_by_weight: Mapping[float, Sequence[float]], share: float | None = None
) -> list[Row]:
    """A row for each weight and rate."""
    rows = []
    for weight, rates in rates_by_weight.items():
        rows += [pretrained(method, rate, weight, share) for rate in rates]
    return rows


def without_tokens(name: str, config: str, rate: float) -> Row:
    """A pre-training that predicts something else than tokens."""
    return Row(f"{name}, {rate:g}", config, tokenizer="", options={RATE: rate}, data="fashion_mnist_20000")


# Without a context loss, the rates that were chosen before. With W = 0.5, that rate and a neighbour to which
# the first figures point; the other weights at the better of the two.
ON_KCLIP = [
    *swept("MIM", {0.0: [12e-3], 0.25: [24e-3], 0.5: [12e-3, 24e-3], 1.0: [24e-3]}),
    *swept("PIM", {0.0: [12e-3], 0.5: [12e-3, 24e-3]}),
    *swept("MaPeT", {0.0: [48e-3], 0.25: [48e-3], 0.5: [24e-3, 48e-3], 1.0: [48e-3]}),
    *swept("BEiT", {0.0: [6e-3], 0.5: [6e-3, 12e-3]}),
    *swept("visible-MIM", {0.5: [12e-3, 24e-3]}, 0.25),
    *swept("visible-MIM", {0.0: [12e-3], 0.25: [12e-3], 0.5: [6e-3, 12e-3, 24e-3], 1.0: [12e-3]}, 0.5),
    *swept("visible-MaPeT", {0.5: [12e-3, 24e-3]}, 0.5),
    *(
        without_tokens("visible-MIM on CLIP features, W = 0.5", REGRESSION, rate)
        for rate in (6e-3, 12e-3, 24e-3, 48e-3)
    ),
    *(without_tokens("MAE", MAE, rate) for rate in (0.75e-3, 1.5e-3, 3e-3, 6e-3)),
]
ON_WINDOWS = [
    *swept("MIM", {0.0: [12e-3, 24e-3], 0.5: [12e-3, 24e-3]}),
    *swept("MaPeT", {0.0: [24e-3, 48e-3], 0.5: [24e-3, 48e-3]}),
    *swept("visible-MIM", {0.0: [12e-3], 0.5: [12e-3, 24e-3]}, 0.25),
    *swept("visible-MIM", {0.5: [12e-3, 24e-3]}, 0.5),
]
# Where a token is a function of its patch's own pixels.
ON_PIXELS = [
    *swept("MIM", {0.0: [12e-3]}),
    *swept("visible-MIM", {0.0: [12e-3], 0.5: [12e-3]}, 0.5),
]

TERAFLOPS, *FROZEN_COLUMNS = FASHION["COMPUTE"].columns
COLUMNS = [TERAFLOPS, *(column for column in FROZEN_COLUMNS if column.name != "k-NN segmentation")]
RULE = "Seed 0 only. The rule: the highest mean of the last three figures."
ON = {**FASHION["ON"], "dataset": "fashion_mnist_20000_held_out"}
CHOICE = Table(
    title="Weights and rates of the context loss, on held-out training images",
    rows=ON_KCLIP,
    columns=COLUMNS,
    notes=[small.FROZEN_NOTE, RULE],
    **ON,
)
CHOICE_WINDOWS = replace(
    CHOICE,
    title="Weights and rates of the context loss, tokens by k-means of windows, on held-out training images",
    rows=[replace(row, tokenizer=GRID, data="fashion_mnist_20000_windows") for row in ON_WINDOWS],
)
CHOICE_PIXELS = replace(
    CHOICE,
    title="Weights of the context loss, tokens by k-means of single patches, on held-out training images",
    rows=[replace(row, tokenizer=GRID, data="fashion_mnist_20000_bootstrap0") for row in ON_PIXELS],
)

# What the rule chose on k-CLIP's tokens, and each row's epochs: as many as cost what MaPeT's 5 do; and for
# some rows 5 as well, and what costs twice as much.
CHOSEN = {
    "MIM": (pretrained("MIM", 12e-3, 0.0), [5, 11]),
    "MIM, W = 1": (pretrained("MIM", 24e-3, 1.0), [5, 10]),
    "PIM": (pretrained("PIM", 12e-3, 0.0), [7]),
    "PIM, W = 0.5": (pretrained("PIM", 24e-3, 0.5), [7]),
    "MaPeT": (pretrained("MaPeT", 48e-3, 0.0), [5, 10]),
    "MaPeT, W = 1": (pretrained("MaPeT", 48e-3, 1.0), [5]),
    "BEiT": (pretrained("BEiT", 6e-3, 0.0), [10]),
    "BEiT, W = 0.5": (pretrained("BEiT", 6e-3, 0.5), [9]),
    "visible-MIM, W = 0.5": (pretrained("visible-MIM", 12e-3, 0.5, 0.5), [5, 13, 26]),
    "visible-MIM on CLIP features, W = 0.5": (without_tokens("CLIP features", REGRESSION, 24e-3), [11]),
    "MAE": (without_tokens("MAE", MAE, 1.5e-3), [13]),
}


def measured(name: str, row: Row, epochs: int, data: str) -> Row:
    """A chosen row for so many epochs, on data whose seeds draw their own tokenizers."""
    return replace(
        row,
        name=f"{name}, {epochs} epochs",
        options={**row.options, **FASHION["of_length"](epochs)},
        curve=name,
        data=data,
    )


MEASURED = {**FASHION["ON"], "baseline": "MaPeT, 5 epochs"}
WEIGHT_NOTE = "W: weight of the context loss."
EQUAL_COMPUTE_NOTE = "Epochs: as many as cost what MaPeT's 5 do, within a tenth."
LENGTHS_NOTE = "Epochs: 5, and as many as cost what MaPeT's 5 and 10 do, within a tenth."
RATE_NOTE = (
    "Rates and weights are those of the choice tables, of other images. Each seed draws its tokenizer."
)
COMPUTE = Table(
    title="Losses of the visible patches over compute, k-CLIP tokens",
    rows=[
        measured(name, row, epochs, FASHION["OWN_TOKENS"])
        for name, (row, lengths) in CHOSEN.items()
        for epochs in lengths
    ],
    columns=[TERAFLOPS, *FROZEN_COLUMNS],
    notes=[small.FROZEN_NOTE, LENGTHS_NOTE, WEIGHT_NOTE, RATE_NOTE],
    **MEASURED,
)

# The same on tokens that know no captions, and on those of one round bootstrapped from these.
ON_WINDOWS_CHOSEN = {
    "MIM": (pretrained("MIM", 12e-3, 0.0), 11),
    "MIM, W = 0.5": (pretrained("MIM", 12e-3, 0.5), 10),
    "MaPeT": (pretrained("MaPeT", 48e-3, 0.0), 5),
    "MaPeT, W = 0.5": (pretrained("MaPeT", 48e-3, 0.5), 5),
    "visible-MIM, W = 0.5": (pretrained("visible-MIM", 12e-3, 0.5, 0.5), 13),
}


def of_equal_compute(name: str, data: str) -> Row:
    """One of these rows on the tokens of a dataset's `grid_encoder`."""
    row, epochs = ON_WINDOWS_CHOSEN[name]
    return replace(measured(name, row, epochs, data), tokenizer=GRID)


def without_captions(data: str) -> list[Row]:
    """All of these rows, and MAE, which has no tokens."""
    mae, (epochs,) = CHOSEN["MAE"]
    return [
        *(of_equal_compute(name, data) for name in ON_WINDOWS_CHOSEN),
        measured("MAE", mae, epochs, FASHION["OWN_TOKENS"]),
    ]


WINDOWS = replace(
    COMPUTE,
    notes=[small.FROZEN_NOTE, EQUAL_COMPUTE_NOTE, WEIGHT_NOTE, RATE_NOTE],
    title="Losses of the visible patches at equal compute, tokens by k-means of windows",
    rows=without_captions("fashion_mnist_20000_windows{seed}"),
)

# Rates at the length that is measured: three each, and while the best is at an end, its neighbour (but for
# MaPeT with the loss). The best ones are those of ON_WINDOWS_CHOSEN.
RATES_ON_WINDOWS = {
    "MIM": [6e-3, 12e-3, 24e-3],
    "MIM, W = 0.5": [6e-3, 12e-3, 24e-3, 48e-3],
    "MaPeT": [12e-3, 24e-3, 48e-3, 96e-3],
    "MaPeT, W = 0.5": [12e-3, 24e-3, 48e-3],
    "visible-MIM, W = 0.5": [6e-3, 12e-3, 24e-3],
}


def at_rates(name: str, rates: Sequence[float]) -> list[Row]:
    """A row of equal compute on tokens of windows, at each of these rates."""
    chosen = of_equal_compute(name, "fashion_mnist_20000_windows{seed}")
    return [
        replace(chosen, name=f"{chosen.name}, {rate:g}", options={**chosen.options, RATE: rate})
        for rate in rates
    ]


CHOICE_RATES = replace(
    CHOICE,
    title="Rates at equal compute, tokens by k-means of windows, on held-out training images",
    rows=[row for name, rates in RATES_ON_WINDOWS.items() for row in at_rates(name, rates)],
    notes=[small.FROZEN_NOTE, EQUAL_COMPUTE_NOTE, WEIGHT_NOTE, RULE],
)

BOOTSTRAPPED = replace(
    WINDOWS,
    title="Losses of the visible patches at equal compute, tokens bootstrapped from those of windows",
    rows=without_captions("fashion_mnist_20000_bootstrapped{seed}"),
)

# What costs as much as MaPeT's 5 epochs, by other measures than frozen features of the same images.
DIGITS_FEW, DIGITS_ALL = FASHION["TRANSFER"].columns
TRANSFER_COLUMNS = [
    replace(FASHION["FINE_TUNING"].columns[0], name="fine-tuning, 600 labels"),
    # Without the paper's numbers, which are of other rows.
    replace(FASHION["OBJECTIVES"].columns[-1], paper={}),
    replace(DIGITS_FEW, name="digits, 100 labels"),
    replace(DIGITS_ALL, name="digits, all labels"),
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
        notes=[FASHION["LAST_LAYER_NOTE"], EQUAL_COMPUTE_NOTE, WEIGHT_NOTE, RATE_NOTE],
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
