# ViTDet's Mask R-CNN on a ViT-B/16 of timm's DINOv3, continued by `mapet-mm pretrain`. Its checkpoint goes
# into `model.backbone.init_cfg.checkpoint`. For another ViT of timm that was continued, set
# `model.backbone.model_name=RUN` and `model.backbone.init_cfg=None`, and its width in the neck.
#
# timm's ViTs have no windows: at 1024 pixels each of the 4,096 patches attends to all others in each layer.
# A ViT-B then needs 657 billion multiply-adds an image, 309 of them for attention; with ViTDet's windows of
# 14 patches in 8 of 12 layers it would be 461. At 512 pixels, attention is 19 of 106.
_base_ = "mapet_vit-base-p16_mask-rcnn_64xb1-100e_coco-1024x1024.py"

model = dict(
    backbone=dict(
        _delete_=True,
        type="mapet_mm.TIMMViT",
        model_name="vit_base_patch16_dinov3",
        drop_path_rate=0.1,
        init_cfg=dict(type="Pretrained", checkpoint="", prefix="backbone."),
    ),
)
