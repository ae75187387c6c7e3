# Each objective at its own rate and at several lengths, over compute.
_base_ = "../fashion_mnist_20000.py"

title = "Quality over compute on fashion_mnist_20000, k-CLIP tokens"
rows = [row for lengths in _base_.pretrained.values() for row in lengths.values()]
columns = [
    dict(_base_.frozen, name="pre-training", unit="TFLOPs", metric="pre-training/teraflops"),
    *_base_.every_pooling,
]
baseline = "MaPeT, 5 epochs"
notes = [
    _base_.frozen_note,
    "TFLOPs: the products of the pre-training, forward and backward, counted by PyTorch.",
    _base_.own_rate_note,
]
