# The paper's segmentation on ADE20K (tab:segmentation).
_base_ = "../imagenet.py"

data = dict(folders=["data/imagenet", "data/ade/ADEChallengeData2016"])
title = "Semantic segmentation on ADE20K, pre-trained on ImageNet-1k"
rows = [_base_.mim_vqkd, _base_.pim_vqkd, _base_.mapet_vqkd, _base_.cae_vqkd, _base_.beit_vqkd]
upernet = "configs/segmentation/mapet_vit-{size}-p16_upernet_8xb2-amp-160k_ade20k-512x512.py"
columns = [
    dict(
        name="ViT-T",
        unit="mIoU, %",
        config=upernet,
        metric="mIoU",
        paper={
            "MIM, VQ-KD": 39.0,
            "PIM, VQ-KD": 40.2,
            "MaPeT, VQ-KD": 39.3,
            "CAE, VQ-KD": 39.2,
            "BEiT, VQ-KD": 39.9,
        },
        **_base_.tiny,
    ),
    dict(
        name="ViT-S",
        unit="mIoU, %",
        config=upernet,
        metric="mIoU",
        paper={
            "MIM, VQ-KD": 45.6,
            "PIM, VQ-KD": 46.1,
            "MaPeT, VQ-KD": 47.0,
            "CAE, VQ-KD": 45.9,
            "BEiT, VQ-KD": 46.7,
        },
        **_base_.small,
    ),
    dict(
        name="ViT-B",
        unit="mIoU, %",
        config=upernet,
        metric="mIoU",
        paper={
            "MIM, VQ-KD": 49.3,
            "PIM, VQ-KD": 49.0,
            "MaPeT, VQ-KD": 50.4,
            "CAE, VQ-KD": 50.2,
            "BEiT, VQ-KD": 50.3,
        },
        **_base_.base,
    ),
]
