# The objectives, each at its own rate, at equal passes and at equal compute.
_base_ = "../micro/objectives.py"

rows = [_base_.own_tokens_alone, _base_.scratch, *_base_.equal_epochs, *_base_.equal_compute]
# Fine-tuning and UperNet have tables of their own, `fine_tuning` and `segmentation`.
columns = [
    dict(name="k-NN, class token", metric="k-NN, class token", **_base_.frozen),
    dict(name="k-NN, patch mean", metric="k-NN, mean", **_base_.frozen),
    *_base_.frozen_columns,
    _base_.linear_probe,
]
notes = [*_base_.notes, _base_.equal_compute_note]
