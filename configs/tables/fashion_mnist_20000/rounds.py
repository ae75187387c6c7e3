# Bootstrapped tokens: MaPeT on tokens of pixels, and on those of the rounds before, at equal passes in all.
_base_ = "../fashion_mnist_20000.py"

title = "Rounds of bootstrapped tokens on fashion_mnist_20000, MaPeT"
own = dict(method="mapet", pretrain=_base_.pretrain, tokenizer="configs/micro/grid.py")
round0 = dict(data="fashion_mnist_20000_round0", **own)
round1 = dict(data="fashion_mnist_20000_round1", **own)
round2 = dict(data="fashion_mnist_20000_round2", **own)
rows = [
    dict(name="round 0, 5 epochs", **round0),
    dict(name="round 1, 5 epochs", **round1),
    dict(name="round 2, 5 epochs", **round2),
    dict(name="round 0, 10 epochs", options=_base_.lengths[10], **round0),
    dict(name="round 1, going on from round 0, 5 + 5 epochs", start="round 0, 5 epochs", **round1),
    dict(name="round 0, 15 epochs", options=_base_.lengths[15], **round0),
    dict(
        name="round 2, going on from round 1, 5 + 5 + 5 epochs",
        start="round 1, going on from round 0, 5 + 5 epochs",
        **round2,
    ),
    _base_.mapet,
]
columns = _base_.frozen_columns
baseline = "round 0, 10 epochs"
notes = [
    _base_.frozen_note,
    "Round 0: k-means of pixels. Rounds 1 and 2: k-means of the features of a MaPeT that was pre-trained for "
    "5 epochs on the tokens of the round before: with these, round 1 costs 10 epochs and round 2 costs 15, "
    "as many as the rows of round 0 that train longer.",
    "Going on: the backbone starts from the weights of the row that is named, the head anew.",
    "MaPeT, the last row, has 5 epochs on tokens of k-CLIP, whose tower was trained on captions.",
]
