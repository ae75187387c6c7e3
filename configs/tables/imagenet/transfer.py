# The paper's cross-domain transfer (tab:suppl_new_domains). It does not name the model's size: ViT-B here.
_base_ = "../imagenet.py"

data = dict(
    folders=["data/imagenet", "data/stanford_cars", "data/food-101", "data/fgvc-aircraft-2013b"],
)
title = "Linear probe on other datasets, pre-trained on ImageNet-1k"
rows = [_base_.cae_vqkd, _base_.beit_vqkd, _base_.mapet_vqkd]
columns = [
    dict(
        name="Stanford Cars",
        unit="top-1, %",
        config=_base_.benchmarks + "vit-base-p16_8xb128-linear-amp-coslr-50e_cars.py",
        metric="accuracy/top1",
        paper={"CAE, VQ-KD": 53.6, "BEiT, VQ-KD": 64.5, "MaPeT, VQ-KD": 68.5},
        **_base_.base,
    ),
    dict(
        name="Food-101",
        unit="top-1, %",
        config=_base_.benchmarks + "vit-base-p16_8xb128-linear-amp-coslr-50e_food101.py",
        metric="accuracy/top1",
        paper={"CAE, VQ-KD": 81.4, "BEiT, VQ-KD": 86.9, "MaPeT, VQ-KD": 86.9},
        **_base_.base,
    ),
    dict(
        name="FGVC-Aircraft",
        unit="top-1, %",
        config=_base_.benchmarks + "vit-base-p16_8xb128-linear-amp-coslr-50e_aircraft.py",
        metric="accuracy/top1",
        paper={"CAE, VQ-KD": 40.5, "BEiT, VQ-KD": 44.9, "MaPeT, VQ-KD": 46.8},
        **_base_.base,
    ),
]
notes = [_base_.probe_note]
