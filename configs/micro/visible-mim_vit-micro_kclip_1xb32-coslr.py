# An encoder of the visible half of the patches, which also predicts their tokens; an extension, not MaPeT.
_base_ = "mim_vit-micro_kclip_1xb32-coslr.py"

model = dict(
    type="mapet_mm.VisibleMIM",
    backbone=dict(objective="context", cutting_point=1 + round(0.5 * _base_.num_patches)),
    neck=dict(
        type="mapet_mm.CrossAttentionPredictor",
        embed_dims=_base_.arch.embed_dims,
        num_layers=2,
        num_heads=_base_.arch.num_heads,
    ),
    context_loss=0.5,
)
