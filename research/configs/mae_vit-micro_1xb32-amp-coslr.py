# MMPretrain's MAE: a quarter of the patches is visible, the pixels of the others, normalised, are predicted.
_base_ = "mim_vit-micro_kclip_1xb32-amp-coslr.py"

train_dataloader = dict(dataset=dict(pipeline=[*_base_.load, _base_.color_jitter, dict(type="PackInputs")]))
data_preprocessor = dict(
    _delete_=True, type="SelfSupDataPreprocessor", mean=_base_.mean, std=_base_.std, to_rgb=True
)
custom_hooks = []  # it has no tokens to check

model = dict(
    _delete_=True,
    type="MAE",
    backbone=dict(
        type="MAEViT",
        arch=_base_.arch,
        img_size=_base_.img_size,
        patch_size=_base_.patch_size,
        mask_ratio=0.75,
    ),
    neck=dict(
        type="MAEPretrainDecoder",
        num_patches=_base_.num_patches,
        patch_size=_base_.patch_size,
        embed_dim=_base_.arch.embed_dims,
        decoder_embed_dim=_base_.arch.embed_dims,
        decoder_depth=2,
        decoder_num_heads=_base_.arch.num_heads,
    ),
    head=dict(
        type="MAEPretrainHead",
        norm_pix=True,
        patch_size=_base_.patch_size,
        loss=dict(type="PixelReconstructionLoss", criterion="L2"),
    ),
    init_cfg=[
        dict(type="Xavier", layer="Linear", distribution="uniform"),
        dict(type="Constant", layer="LayerNorm", val=1.0, bias=0.0),
    ],
)
