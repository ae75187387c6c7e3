# The objectives at equal passes and, where a step costs less than MaPeT's, at equal compute.
_base_ = "../micro/objectives.py"

# A step costs 294.7 MFLOPs an image with MaPeT, 129.0 with MIM and 147.9 with BEiT (the tests count them).
rows = [
    *_base_.rows,
    dict(name="MIM, equal compute", method="mim", pretrain=_base_.pretrain, options=_base_.lengths[11]),
    dict(name="BEiT, equal compute", method="beit", pretrain=_base_.pretrain, options=_base_.lengths[10]),
]
# Fine-tuning and UperNet have tables of their own, `fine_tuning` and `segmentation`.
columns = [*_base_.frozen_columns, _base_.linear_probe]
notes = [
    *_base_.notes,
    "Equal compute: MaPeT's 5 epochs cost as much arithmetic as 11.4 of MIM's and 10.0 of BEiT's; these rows "
    "have 11 and 10 epochs, all others 5.",
]
