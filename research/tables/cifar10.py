"""Tables on CIFAR-10's photographs: a run of equal compute takes a quarter of an hour of a CPU core.

`choice` chooses each method's learning rate on 5,000 of the training images, with the other 35,000 to learn
from; seed 0. No other table measures these 5,000. Rule, declared before the runs: the highest mean of the
three figures; while the best rate is at an end of those that were run, its neighbour is run as well, and
rates beyond a worse one are not. All other tables measure on 10,000 images, and pre-train on these 35,000
(the rows of `choice` are their seed 0) or on half of them.

With tokens of windows MaPeT and MIM have the rates that were chosen for tokens of a network that knew labels.
`choice_windows`, declared after these runs and before its own, tries the same three rates on the same 5,000
images. If another is better, the page says so; no row is replaced.
"""

from dataclasses import replace

from lab import small
from lab.tables import Column, Data, Row, Table

LITE0 = "research/configs/lite0.py"
HELD_OUT = "cifar10_held_out"
FINETUNE_FEW = "configs/micro/vit-micro_1xb50-{recipe}_few-labels.py"
FROZEN_QUALITY = small.FROZEN_COLUMNS[:3]
# As many epochs as cost what MaPeT's 5 do, within a tenth.
EQUAL_COMPUTE = {"MaPeT": 5, "MIM": 11, "VisibleMIM": 13, "MAE": 13}
# Those that the rule led to.
RATES = {
    "MaPeT": [12e-3, 24e-3, 48e-3],
    "MIM": [3e-3, 6e-3, 12e-3],
    "VisibleMIM": [1.5e-3, 3e-3, 6e-3],
    "MAE": [0.75e-3, 1.5e-3, 3e-3],
}
METHODS = {"MaPeT": "mapet", "MIM": "mim", "VisibleMIM": "visible-mim"}


def pretrained(name: str, rate: float) -> Row:
    """A pre-training of equal compute at a rate."""
    options = {small.RATE: rate, **small.of_length(EQUAL_COMPUTE[name])}
    row = Row(f"{name}, {rate:g}", options=options)
    if name == "MAE":
        return replace(row, pretrain=small.MAE, tokenizer="")
    return replace(row, pretrain=small.PRETRAIN_AMP, values=dict(method=METHODS[name]))


TOKENS_NOTE = (
    "Tokens: 256 clusters of the last grid of EfficientNet-Lite0, which was trained on ImageNet's labels. "
    "MAE has none."
)
EQUAL_COMPUTE_NOTE = "All cost what MaPeT's 5 epochs do, within a tenth: MIM 11, VisibleMIM and MAE 13."

ON = dict(
    dataset="cifar10",
    tokenizer=LITE0,
    data=Data(
        command=["research/converters/cifar10.py"], outputs=["data/cifar10", "data/efficientnet_lite0.pth"]
    ),
)
CHOICE = Table(
    title="Learning rates on CIFAR-10, on held-out training images",
    rows=[pretrained(name, rate) for name, rates in RATES.items() for rate in rates],
    columns=[small.TERAFLOPS, *FROZEN_QUALITY],
    notes=[small.FROZEN_NOTE, TOKENS_NOTE, EQUAL_COMPUTE_NOTE, "Seed 0 only."],
    **{**ON, "dataset": HELD_OUT},
)

# What the rule chose.
CHOSEN = {"MaPeT": 24e-3, "MIM": 6e-3, "VisibleMIM": 3e-3, "MAE": 1.5e-3}


def chosen(name: str) -> Row:
    """A method at its chosen rate."""
    return replace(pretrained(name, CHOSEN[name]), name=name, data=HELD_OUT)


def without_labels(row: Row, tokens: str) -> Row:
    """A method on tokens that no labels have made."""
    return replace(row, name=f"{row.name}, tokens {tokens}", tokenizer=small.GRID, data=f"cifar10_{tokens}")


CHOICE_WINDOWS = replace(
    CHOICE,
    title="Learning rates for tokens of windows, on held-out training images",
    rows=[
        without_labels(pretrained(name, rate), "windows") for name in ("MaPeT", "MIM") for rate in RATES[name]
    ],
    notes=[small.FROZEN_NOTE, "Seed 0 only."],
)


OBJECTIVES = Table(
    title="Objectives on CIFAR-10 at equal compute",
    rows=[
        small.SCRATCH,
        *map(chosen, CHOSEN),
        *(
            without_labels(chosen(name), tokens)
            for tokens in ("windows", "bootstrapped")
            for name in ("MaPeT", "MIM")
        ),
    ],
    columns=[
        small.TERAFLOPS,
        *FROZEN_QUALITY,
        Column("linear probe", "top-1, %", small.PROBE, small.LAST_LAYER),
        Column("400 labels", "top-1, %", FINETUNE_FEW, "accuracy/top1", values=dict(recipe="coslr")),
        Column(
            "4,000 labels",
            "top-1, %",
            small.FINETUNE,
            "accuracy/top1",
            {
                "train_dataloader.dataset.ann_file": "meta/train_4000.txt",
                "train_cfg.max_epochs": 40,
                "param_scheduler.1.end": 40,
            },
            values=dict(recipe="coslr"),
        ),
    ],
    baseline="MaPeT",
    notes=[
        small.FROZEN_NOTE,
        small.LAST_LAYER_NOTE,
        TOKENS_NOTE,
        EQUAL_COMPUTE_NOTE,
        "Tokens of windows: clusters of the pixels around each patch; bootstrapped: of the features of a MIM "
        "of 5 epochs on these. Rates are those for the other tokens. All seeds share the tokens.",
        "No pre-training: trained from random weights with the labels, the 400 for 350 epochs instead of 60.",
    ],
    **ON,
)

HALF = {"train_dataloader.dataset.ann_file": "meta/train_17500.txt"}


def plain_mapet(name: str, data: str, channels: int) -> Row:
    """MaPeT without color jitter on half of the images."""
    options = {small.RATE: CHOSEN["MaPeT"], **HALF}
    if channels != 3:
        options["model.backbone.in_channels"] = channels
    return Row(name, small.PRETRAIN_AMP, options=options, data=data, values=dict(method="mapet-plain"))


def sensor(kind: str, words: str, channels: int = 3) -> Table:
    """A student that sees another sensor's pictures, with tokens of the photographs or of its own.

    Declared before the runs: the tokens of the photographs are ahead of its own in the mean of the three
    figures, with a p below 0.05 by Welch's test of these means over the seeds after Holm's correction for the
    three sensors; or it is said that they are not.
    """
    options = {} if channels == 3 else {"model.in_channels": channels}
    return Table(
        title=f"A student that sees {words}",
        rows=[
            small.SCRATCH,
            plain_mapet("tokens of its own pictures", f"cifar10_{kind}", channels),
            plain_mapet("tokens of the photographs in colour", f"cifar10_{kind}_rgb", channels),
        ],
        columns=[replace(column, options=options) for column in FROZEN_QUALITY],
        baseline="tokens of its own pictures",
        notes=[small.FROZEN_NOTE, TOKENS_NOTE, "MaPeT, 5 epochs of 17,500 images, without color jitter."],
        **{**ON, "dataset": f"cifar10_{kind}"},
    )


ORDERED = ["rare first", "rare last", "salient first"]
ORDERS = Table(
    title="The order of the patches, MaPeT on CIFAR-10",
    rows=[
        replace(chosen("MaPeT"), name="random", options={small.RATE: CHOSEN["MaPeT"], **HALF}),
        *(
            replace(
                chosen("MaPeT"),
                name=order,
                options={small.RATE: CHOSEN["MaPeT"], **HALF, "model.order": order},
                values=dict(method="ordered-mapet"),
            )
            for order in ORDERED
        ),
    ],
    columns=FROZEN_QUALITY,
    baseline="random",
    notes=[
        small.FROZEN_NOTE,
        TOKENS_NOTE,
        "5 epochs of 17,500 images, all at the rate that was chosen for random orders. Patches are drawn one "
        "after the other, with a probability that goes with the inverse of their token's frequency, with it, "
        "or with the distance of the token's centroid from the mean patch, standardised.",
    ],
    **ON,
)

CAMVID = Data(command=["research/converters/camvid.py"], outputs=["data/camvid_32", "data/camvid_64"])
# The "seeds" are CamVid's three recordings: each is left out once, and measured.
STREETS = Table(
    title="Segmentation of CamVid's streets, each of three recordings left out",
    rows=[small.SCRATCH, *map(chosen, CHOSEN)],
    columns=[
        Column(
            "k-NN segmentation",
            "mIoU, %",
            "research/configs/streets_frozen.py",
            "k-NN segmentation, patch tokens",
            source=CAMVID,
        ),
        Column(
            "frozen, linear",
            "mIoU, %",
            "configs/micro/vit-micro_linear-segmentation_1xb8-{recipe}.py",
            "mIoU",
            source=CAMVID,
            values=dict(recipe="coslr"),
        ),
        Column("UperNet", "mIoU, %", small.UPERNET, "mIoU", source=CAMVID),
    ],
    notes=[
        "900 squares of 64 pixels of the halved photographs of two recordings, 200 for k-NN; measured on all "
        "of the third. ± is over the recordings, not over seeds of one; each has another seed of its "
        "pre-training.",
        "No pre-training: k-NN of random weights; the linear layer with the whole ViT, more than three times "
        "as long; UperNet from random weights.",
        EQUAL_COMPUTE_NOTE,
    ],
    **{**ON, "dataset": "camvid{seed}"},
)

TABLES = dict(
    choice=CHOICE,
    choice_windows=CHOICE_WINDOWS,
    objectives=OBJECTIVES,
    one_band=sensor("band", "one band, the brightness"),
    inverted_band=sensor("inverted", "one band, inverted, of 16 levels"),
    five_bands=sensor("five", "five bands", channels=5),
    orders=ORDERS,
    streets=STREETS,
)
