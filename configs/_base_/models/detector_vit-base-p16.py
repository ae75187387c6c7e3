# What detectors on a plain ViT-B have in common: images, backbone and a simple feature pyramid. The
# pre-training checkpoint goes into `model.backbone.init_cfg.checkpoint` (--cfg-options).
model = dict(
    data_preprocessor=dict(
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
    ),
    backbone=dict(
        type="mapet_mm.MaPeTViT",
        arch="deit-base",
        img_size=1024,
        patch_size=16,
        drop_path_rate=0.1,
        out_type="featmap",
        init_cfg=dict(type="Pretrained", checkpoint="", prefix="backbone."),
    ),
    neck=dict(type="mapet_mm.SimpleFeaturePyramid", in_channels=768, out_channels=256),
)
