_base_ = "../mapet/mapet_vit-tiny-p16_kclip_16xb128-amp-coslr-300e_in1k.py"

# The encoder sees the class token and half of the 196 patches; two cross-attention layers predict the rest.
model = dict(
    type="mapet_mm.VisibleMIM",
    backbone=dict(objective="context", cutting_point=99),
    neck=dict(type="mapet_mm.CrossAttentionPredictor", embed_dims=192, num_layers=2, num_heads=3),
    context_loss=0.5,
)
