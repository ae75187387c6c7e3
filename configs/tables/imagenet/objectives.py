# The paper's table of objectives (tab:comparison_nlp).
_base_ = "../imagenet.py"

title = "Pre-training objectives on ImageNet-1k"
rows = [
    _base_.mim_vqkd,
    _base_.pim_vqkd,
    _base_.mapet_vqkd,
    _base_.mim_kclip,
    _base_.pim_kclip,
    _base_.mapet_kclip,
]
columns = [
    dict(
        name="ViT-T, fine-tuning",
        unit="top-1, %",
        config=_base_.finetune,
        metric="accuracy/top1",
        paper={
            "MIM, VQ-KD": 74.6,
            "PIM, VQ-KD": 74.9,
            "MaPeT, VQ-KD": 74.5,
            "MIM, k-CLIP": 74.9,
            "PIM, k-CLIP": 75.3,
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
            "MIM, VQ-KD": 55.3,
            "PIM, VQ-KD": 56.4,
            "MaPeT, VQ-KD": 59.6,
            "MIM, k-CLIP": 60.4,
            "PIM, k-CLIP": 59.7,
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
            "MIM, VQ-KD": 82.0,
            "PIM, VQ-KD": 82.1,
            "MaPeT, VQ-KD": 82.2,
            "MIM, k-CLIP": 82.0,
            "PIM, k-CLIP": 81.8,
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
            "MIM, VQ-KD": 69.9,
            "PIM, VQ-KD": 68.7,
            "MaPeT, VQ-KD": 69.8,
            "MIM, k-CLIP": 71.1,
            "PIM, k-CLIP": 69.5,
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
            "MIM, VQ-KD": 83.8,
            "PIM, VQ-KD": 83.7,
            "MaPeT, VQ-KD": 84.4,
            "MIM, k-CLIP": 83.3,
            "PIM, k-CLIP": 83.3,
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
            "MIM, VQ-KD": 72.3,
            "PIM, VQ-KD": 73.3,
            "MaPeT, VQ-KD": 73.8,
            "MIM, k-CLIP": 72.3,
            "PIM, k-CLIP": 73.5,
            "MaPeT, k-CLIP": 73.5,
        },
        **_base_.base,
    ),
]
notes = [_base_.probe_note]
