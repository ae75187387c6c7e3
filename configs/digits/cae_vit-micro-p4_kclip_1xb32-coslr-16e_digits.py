# MMPretrain's CAE on a plain ViT; regressor and decoder are as wide as the encoder and have half its depth.
_base_ = ["_base_/vit-micro-p4.py", "_base_/digits_tokens_mask-18.py", "_base_/pretrain.py"]

model = dict(
    type="mapet_mm.ProjectedCAE",
    backbone=dict(
        type="CAEPretrainViT",
        arch=_base_.arch,
        img_size=24,
        patch_size=4,
        layer_scale_init_value=0.1,
        bias=True,
    ),
    neck=dict(
        type="mapet_mm.ProjectedCAENeck",
        encoder_dims=96,
        embed_dims=96,
        num_heads=3,
        regressor_depth=2,
        decoder_depth=2,
        layer_scale_init_value=0.1,
        mask_tokens_num=18,
        num_classes=128,
    ),
    head=dict(type="mapet_mm.CAETokenHead", loss=dict(type="CAELoss", lambd=2)),
    target_generator=dict(type="mapet_mm.PrecomputedTokens", vocab_size=128),
    base_momentum=0.0,
)
