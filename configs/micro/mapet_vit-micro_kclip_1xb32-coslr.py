_base_ = "_base_/pretrain.py"

model = dict(
    type="mapet_mm.MaPeT",
    backbone=dict(
        type="mapet_mm.MaPeTPretrainViT",
        arch=_base_.arch,
        img_size=_base_.img_size,
        patch_size=_base_.patch_size,
        objective="mapet",
        # 70 % of the sequence, class token and patches, are targets, as the paper prefers.
        cutting_point=round(60 / 197 * (1 + _base_.num_patches)),
    ),
    head=dict(
        type="mapet_mm.TokenPredictionHead",
        embed_dims=_base_.arch.embed_dims,
        vocab_size=_base_.vocab_size,
    ),
    target_generator=dict(type="mapet_mm.PrecomputedTokens", vocab_size=_base_.vocab_size),
)
