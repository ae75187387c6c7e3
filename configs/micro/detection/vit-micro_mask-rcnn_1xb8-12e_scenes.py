# ViTDet's Mask R-CNN on scenes: small maps of strides 4 and 8, because the patches are small. The
# checkpoint goes into `model.backbone.init_cfg.checkpoint` (--cfg-options).
_base_ = ["../../_base_/models/mask-rcnn_vit-base-p16.py", "../_base_/scenes_coco.py"]

strides = [4, 8]
model = dict(
    data_preprocessor=dict(mean=_base_.mean, std=_base_.std, pad_size_divisor=1),
    backbone=dict(_delete_=True, **_base_.backbone),
    neck=dict(in_channels=_base_.arch.embed_dims, out_channels=64, scale_factors=(1, 0.5), num_outs=2),
    rpn_head=dict(
        in_channels=64,
        feat_channels=64,
        num_convs=1,
        anchor_generator=dict(scales=[5], strides=strides),
    ),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=64, featmap_strides=strides, finest_scale=16),
        bbox_head=dict(
            in_channels=64,
            conv_out_channels=64,
            fc_out_channels=128,
            num_classes=len(_base_.thing_classes),
        ),
        mask_roi_extractor=dict(out_channels=64, featmap_strides=strides, finest_scale=16),
        mask_head=dict(in_channels=64, conv_out_channels=64, num_classes=len(_base_.thing_classes)),
    ),
    train_cfg=dict(
        rpn=dict(sampler=dict(num=64)),
        rpn_proposal=dict(nms_pre=200, max_per_img=100),
        rcnn=dict(sampler=dict(num=32)),
    ),
    test_cfg=dict(rpn=dict(nms_pre=200, max_per_img=50), rcnn=dict(max_per_img=20)),
)
