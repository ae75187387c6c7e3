# The paper's comparison with other pre-trainings (tab:comparison).
_base_ = "../imagenet.py"

title = "Comparison with BEiT and CAE on ImageNet-1k"
rows = [
    _base_.scratch,
    _base_.cae_vqkd,
    _base_.beit_vqkd,
    _base_.mapet_vqkd,
    _base_.cae_kclip,
    _base_.beit_kclip,
    _base_.mapet_kclip,
]
columns = [
    dict(
        name="ViT-T, fine-tuning",
        unit="top-1, %",
        config=_base_.finetune,
        metric="accuracy/top1",
        paper={
            "ViT, no pre-training": 73.7,
            "CAE, VQ-KD": 73.4,
            "BEiT, VQ-KD": 75.0,
            "MaPeT, VQ-KD": 74.5,
            "CAE, k-CLIP": 73.7,
            "BEiT, k-CLIP": 74.8,
            "MaPeT, k-CLIP": 75.5,
        },
        **_base_.tiny,
    ),
    dict(
        name="ViT-T, linear probe",
        unit="top-1, %",
        config=_base_.probe,
        metric="accuracy/top1",
        paper={
            "CAE, VQ-KD": 52.4,
            "BEiT, VQ-KD": 62.0,
            "MaPeT, VQ-KD": 59.6,
            "CAE, k-CLIP": 53.9,
            "BEiT, k-CLIP": 61.5,
            "MaPeT, k-CLIP": 62.5,
        },
        **_base_.tiny,
    ),
    dict(
        name="ViT-S, fine-tuning",
        unit="top-1, %",
        config=_base_.finetune,
        metric="accuracy/top1",
        paper={
            "ViT, no pre-training": 79.8,
            "CAE, VQ-KD": 81.6,
            "BEiT, VQ-KD": 82.2,
            "MaPeT, VQ-KD": 82.2,
            "CAE, k-CLIP": 81.5,
            "BEiT, k-CLIP": 81.9,
            "MaPeT, k-CLIP": 82.1,
        },
        **_base_.small,
    ),
    dict(
        name="ViT-S, linear probe",
        unit="top-1, %",
        config=_base_.probe,
        metric="accuracy/top1",
        paper={
            "CAE, VQ-KD": 63.4,
            "BEiT, VQ-KD": 72.6,
            "MaPeT, VQ-KD": 69.8,
            "CAE, k-CLIP": 62.9,
            "BEiT, k-CLIP": 71.1,
            "MaPeT, k-CLIP": 71.6,
        },
        **_base_.small,
    ),
    dict(
        name="ViT-B, fine-tuning",
        unit="top-1, %",
        config=_base_.finetune,
        metric="accuracy/top1",
        paper={
            "ViT, no pre-training": 81.8,
            "CAE, VQ-KD": 83.5,
            "BEiT, VQ-KD": 84.4,
            "MaPeT, VQ-KD": 84.4,
            "CAE, k-CLIP": 82.7,
            "BEiT, k-CLIP": 83.3,
            "MaPeT, k-CLIP": 83.6,
        },
        **_base_.base,
    ),
    dict(
        name="ViT-B, linear probe",
        unit="top-1, %",
        config=_base_.probe,
        metric="accuracy/top1",
        paper={
            "CAE, VQ-KD": 69.4,
            "BEiT, VQ-KD": 75.0,
            "MaPeT, VQ-KD": 73.8,
            "CAE, k-CLIP": 67.6,
            "BEiT, k-CLIP": 73.3,
            "MaPeT, k-CLIP": 73.5,
        },
        **_base_.base,
    ),
]
notes = [_base_.probe_note]
