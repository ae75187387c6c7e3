# ViT-B/16 with MMPretrain's MAE: a quarter of the patches is seen, the pixels of the others are predicted.
model = dict(
    type="MAE",
    backbone=dict(type="MAEViT", arch="deit-base", img_size=224, patch_size=16, mask_ratio=0.75),
    neck=dict(
        type="MAEPretrainDecoder",
        num_patches=196,
        patch_size=16,
        embed_dim=768,
        decoder_embed_dim=512,
        decoder_depth=8,
        decoder_num_heads=16,
    ),
    head=dict(
        type="MAEPretrainHead",
        norm_pix=True,
        patch_size=16,
        loss=dict(type="PixelReconstructionLoss", criterion="L2"),
    ),
    init_cfg=[
        dict(type="Xavier", layer="Linear", distribution="uniform"),
        dict(type="Constant", layer="LayerNorm", val=1.0, bias=0.0),
    ],
)
