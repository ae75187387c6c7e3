# The objectives at equal passes and, where a step costs less than MaPeT's, at equal compute.
_base_ = "../micro/objectives.py"

rows = [*_base_.rows, *_base_.equal_compute]
# Fine-tuning and UperNet have tables of their own, `fine_tuning` and `segmentation`.
columns = [*_base_.frozen_columns, _base_.linear_probe]
protocols = 1
notes = [_base_.first_note, *_base_.notes[1:], _base_.equal_compute_note]
