_base_ = ["_base_/vit-micro-p4.py", "_base_/digits_tokens.py", "_base_/pretrain.py"]

model = dict(
    type="mapet_mm.MaPeT",
    backbone=dict(
        type="mapet_mm.MaPeTPretrainViT",
        arch=_base_.arch,
        img_size=24,
        patch_size=4,
        objective="mapet",
        cutting_point=11,  # 70 % of the sequence are targets, as the paper prefers
    ),
    head=dict(type="mapet_mm.TokenPredictionHead", embed_dims=96, vocab_size=128),
    target_generator=dict(type="mapet_mm.PrecomputedTokens", vocab_size=128),
)
