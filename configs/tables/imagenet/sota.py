# The paper's comparison with the state of the art (tab:sota). Only MaPeT's cells are run: the paper took the
# other numbers from their papers, with other settings than its own.
_base_ = "../imagenet.py"

title = "Comparison with numbers of the literature on ImageNet-1k"
rows = [
    dict(name="BEiT, 300 epochs (literature)", columns=[]),
    dict(name="CAE, 300 epochs (literature)", columns=[]),
    dict(name="SplitMask, 300 epochs (literature)", columns=[]),
    dict(name="MaskFeat, 300 epochs (literature)", columns=[]),
    dict(name="PeCo, 300 epochs (literature)", columns=[]),
    dict(name="MVP, 300 epochs (literature)", columns=[]),
    dict(name="BEiT v2, 300 epochs (literature)", columns=[]),
    _base_.mapet_kclip,
    _base_.mapet_vqkd,
    dict(name="BEiT, 800 epochs (literature)", columns=[]),
    dict(name="CAE, 800 epochs (literature)", columns=[]),
    dict(name="CAE, 1600 epochs (literature)", columns=[]),
    dict(name="BEiT v2, 1600 epochs (literature)", columns=[]),
]
columns = [
    dict(
        name="ViT-S, fine-tuning",
        unit="top-1, %",
        config=_base_.finetune,
        metric="accuracy/top1",
        paper={
            "BEiT, 300 epochs (literature)": 81.7,
            "CAE, 300 epochs (literature)": 82.0,
            "MaPeT, k-CLIP": 82.1,
            "MaPeT, VQ-KD": 82.2,
        },
        **_base_.small,
    ),
    dict(
        name="ViT-B, fine-tuning",
        unit="top-1, %",
        config=_base_.finetune,
        metric="accuracy/top1",
        paper={
            "BEiT, 300 epochs (literature)": 82.9,
            "CAE, 300 epochs (literature)": 83.6,
            "SplitMask, 300 epochs (literature)": 83.6,
            "MaskFeat, 300 epochs (literature)": 83.6,
            "PeCo, 300 epochs (literature)": 84.1,
            "MVP, 300 epochs (literature)": 84.4,
            "BEiT v2, 300 epochs (literature)": 85.0,
            "MaPeT, k-CLIP": 83.6,
            "MaPeT, VQ-KD": 84.4,
            "BEiT, 800 epochs (literature)": 83.2,
            "CAE, 800 epochs (literature)": 83.8,
            "CAE, 1600 epochs (literature)": 83.9,
            "BEiT v2, 1600 epochs (literature)": 85.5,
        },
        **_base_.base,
    ),
]
notes = [
    "Rows marked (literature) are not run: the paper takes their numbers from the methods' own papers, whose "
    "settings and epochs differ. MaPeT's pre-trainings have 300 epochs.",
]
