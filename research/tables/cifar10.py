"""Tables on CIFAR-10's photographs: at equal compute, a run takes half an hour to an hour of a CPU core.

`choice` chooses each method's learning rate on 5,000 of the training images, with the other 35,000 to learn
from; seed 0. No other table measures these 5,000. Rule, declared before the runs: the highest mean of the
three figures; while the best rate is at an end of those that were run, its neighbour is run as well, and
rates beyond a worse one are not.
"""

from dataclasses import replace

from lab import small
from lab.tables import Data, Row, Table

LITE0 = "research/configs/lite0.py"
# As many epochs as cost what MaPeT's 5 do, within a tenth.
EQUAL_COMPUTE = {"MaPeT": 5, "MIM": 11, "VisibleMIM": 13, "MAE": 13}
RATES = {
    "MaPeT": [6e-3, 12e-3, 24e-3, 48e-3],
    "MIM": [3e-3, 6e-3, 12e-3, 24e-3],
    "VisibleMIM": [3e-3, 6e-3, 12e-3, 24e-3],
    "MAE": [0.75e-3, 1.5e-3, 3e-3, 6e-3],
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

CHOICE = Table(
    title="Learning rates on CIFAR-10, on held-out training images",
    dataset="cifar10_held_out",
    tokenizer=LITE0,
    data=Data(
        command=["research/converters/cifar10.py"], outputs=["data/cifar10", "data/efficientnet_lite0.pth"]
    ),
    rows=[pretrained(name, rate) for name, rates in RATES.items() for rate in rates],
    columns=[small.TERAFLOPS, *small.FROZEN_COLUMNS[:3]],
    notes=[small.FROZEN_NOTE, TOKENS_NOTE, EQUAL_COMPUTE_NOTE, "Seed 0 only."],
)

TABLES = dict(choice=CHOICE)
