# The objectives, each at its own rate, at equal passes and at equal compute.
_base_ = "../micro/objectives.py"

rows = [_base_.own_tokens_alone, _base_.scratch, *_base_.equal_epochs, *_base_.equal_compute]
# Fine-tuning and UperNet have tables of their own, `fine_tuning` and `segmentation`.
columns = [*_base_.every_pooling, dict(_base_.linear_probe, metric=_base_.last_layer)]
notes = [
    _base_.frozen_note,
    _base_.last_layer_note,
    _base_.notes[-1],
    _base_.equal_compute_note,
    _base_.own_rate_note,
]
