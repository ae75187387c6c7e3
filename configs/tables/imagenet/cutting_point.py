# The paper's ablation of the cutting point (tab:ablation), ViT-B with VQ-KD tokens; 60 is the recipe's.
_base_ = "../imagenet.py"

cutting_point = "model.backbone.cutting_point"
mapet = dict(method="mapet", tokens="vqkd", tokenizer=_base_.vqkd, pretrain=_base_.pretrain)
title = "Cutting point of MaPeT, ViT-B, VQ-KD tokens"
rows = [
    dict(name="c = 30", options={cutting_point: 30}, **mapet),
    dict(name="c = 40", options={cutting_point: 40}, **mapet),
    dict(name="c = 50", options={cutting_point: 50}, **mapet),
    dict(name="c = 60", **mapet),
    dict(name="c = 98", options={cutting_point: 98}, **mapet),
]
columns = [
    dict(
        name="ViT-B, fine-tuning",
        unit="top-1, %",
        config=_base_.finetune,
        metric="accuracy/top1",
        paper={"c = 30": 84.2, "c = 40": 84.3, "c = 50": 84.3, "c = 60": 84.4, "c = 98": 84.1},
        **_base_.base,
    ),
]
