# Nearest neighbours by each pooling of the frozen features: the order of the objectives depends on it.
_base_ = "objectives.py"

title = "k-NN by pooling on fashion_mnist_20000, k-CLIP tokens"
rows = [row for row in _base_.rows if row["name"] != "tokens alone"]
columns = [
    dict(name="class token", metric="k-NN, class token", **_base_.frozen),
    dict(name="patch mean", metric="k-NN, mean", **_base_.frozen),
    dict(name="both", metric="k-NN, both", **_base_.frozen),
]
notes = [
    "The 20 nearest neighbours; both: class token and patch mean side by side, as they are (the first "
    "version of the protocols).",
    _base_.equal_compute_note,
]
