# Bootstrapped tokens: MaPeT from scratch on tokens of pixels, and on those of the rounds before.
_base_ = "../fashion_mnist_20000.py"

title = "Rounds of bootstrapped tokens on fashion_mnist_20000, MaPeT from scratch"
own = dict(method="mapet", pretrain=_base_.pretrain, tokenizer="configs/micro/grid.py")
rows = [
    dict(name="round 0, tokens of pixels", data="fashion_mnist_20000_round0", **own),
    dict(name="round 1", data="fashion_mnist_20000_round1", **own),
    dict(name="round 2", data="fashion_mnist_20000_round2", **own),
    _base_.mapet,
]
columns = [
    dict(
        name=f"linear probe, {_base_.few_labels}",
        unit="top-1, %",
        config=_base_.probe_few,
        metric="accuracy/top1",
    ),
    dict(name="linear probe, all labels", unit="top-1, %", config=_base_.probe, metric="accuracy/top1"),
    dict(
        name="fine-tuning, all labels",
        unit="top-1, %",
        config=_base_.finetune,
        recipe="coslr",
        metric="accuracy/top1",
    ),
]
notes = [
    _base_.probe_note,
    "MaPeT, the last row, is on tokens of k-CLIP, whose tower was trained on captions.",
]
