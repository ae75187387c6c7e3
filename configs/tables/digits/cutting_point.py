# The paper's ablation of the cutting point (tab:ablation): the same shares of the sequence, of 37 tokens.
_base_ = "../_base_/digits.py"

cutting_point = "model.backbone.cutting_point"
title = "Cutting point of MaPeT on digits"
rows = [
    dict(name="c = 6 (85 % targets)", method="mapet", pretrain=_base_.pretrain, options={cutting_point: 6}),
    dict(name="c = 8 (80 % targets)", method="mapet", pretrain=_base_.pretrain, options={cutting_point: 8}),
    dict(name="c = 9 (75 % targets)", method="mapet", pretrain=_base_.pretrain, options={cutting_point: 9}),
    dict(name="c = 11 (70 % targets)", method="mapet", pretrain=_base_.pretrain),
    dict(name="c = 18 (50 % targets)", method="mapet", pretrain=_base_.pretrain, options={cutting_point: 18}),
]
columns = [
    dict(
        name="linear probe, all labels",
        unit="top-1, %",
        config=_base_.probe,
        metric="accuracy/top1",
    ),
    dict(
        name="fine-tuning, all labels",
        unit="top-1, %",
        config=_base_.finetune,
        recipe="coslr-20e",
        metric="accuracy/top1",
        paper={
            "c = 6 (85 % targets)": 84.2,
            "c = 8 (80 % targets)": 84.3,
            "c = 9 (75 % targets)": 84.3,
            "c = 11 (70 % targets)": 84.4,
            "c = 18 (50 % targets)": 84.1,
        },
    ),
]
notes = [
    _base_.probe_note,
    "The paper's numbers are those of ViT-B with VQ-KD tokens and c = 30, 40, 50, 60, 98 of 197.",
]
