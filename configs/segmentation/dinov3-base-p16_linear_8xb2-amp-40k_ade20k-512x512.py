# Linear segmentation of a frozen ViT-B/16 of timm's DINOv3, continued by `mapet-mm pretrain`. Its checkpoint
# goes into `model.backbone.init_cfg.checkpoint`. For another ViT of timm that was continued, set
# `model.backbone.model_name=RUN` and `model.backbone.init_cfg=None`, and its width in neck and head.
_base_ = "vit-base-p16_linear_8xb2-amp-40k_ade20k-512x512.py"

model = dict(
    backbone=dict(
        _delete_=True,
        type="mapet_mm.TIMMViT",
        model_name="vit_base_patch16_dinov3",
        frozen_stages=12,
        init_cfg=dict(type="Pretrained", checkpoint="", prefix="backbone."),
    ),
)
