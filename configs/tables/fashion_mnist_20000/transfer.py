# The paper's cross-domain transfer (tab:suppl_new_domains), from garments to handwritten digits. Their grid
# of patches is smaller, 6 x 6 instead of 7 x 7, so position embeddings are resized.
_base_ = "../fashion_mnist_20000.py"

title = "Linear probe on digits, pre-trained on fashion_mnist_20000"
rows = [_base_.scratch, *_base_.equal_epochs, _base_.mapet_usual_rate, *_base_.equal_compute]
digits = dict(
    data="digits",
    source=dict(
        command=["tools/dataset_converters/digits.py"],
        outputs=["data/digits", "data/digits_inverted", "data/digits_rotated", "data/digits_scenes"],
    ),
    unit="top-1, %",
    metric=_base_.last_layer,
)
columns = [
    dict(name="linear probe, 100 labels", config=_base_.probe_few, **digits),
    dict(name="linear probe, all labels", config=_base_.probe, **digits),
]
baseline = "MaPeT"
notes = [_base_.last_layer_note, _base_.equal_compute_note, _base_.own_rate_note, _base_.usual_rate_note]
