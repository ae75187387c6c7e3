# The objectives, each at its own rate, at equal passes and at equal compute.
_base_ = "../micro/objectives.py"

rows = [_base_.own_tokens_alone, _base_.scratch, *_base_.equal_epochs, *_base_.equal_compute]
# Fine-tuning and UperNet have tables of their own, `fine_tuning` and `segmentation`.
columns = [*_base_.every_pooling, _base_.linear_probe]
notes = [*_base_.notes, _base_.equal_compute_note, _base_.own_rate_note]
