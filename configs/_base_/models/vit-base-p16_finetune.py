# ViT-B/16 classifier: mean of the last layer's patch tokens -> LayerNorm -> linear (no norm before the mean).
# The pre-training checkpoint goes into `model.backbone.init_cfg.checkpoint` (--cfg-options).
model = dict(
    type="ImageClassifier",
    backbone=dict(
        type="mapet_mm.MaPeTViT",
        arch="deit-base",
        img_size=224,
        patch_size=16,
        drop_path_rate=0.1,
        out_type="avg_featmap",
        final_norm=False,
        init_cfg=dict(type="Pretrained", checkpoint="", prefix="backbone."),
    ),
    neck=None,
    head=dict(
        type="LinearClsHead",
        num_classes=1000,
        in_channels=768,
        loss=dict(type="LabelSmoothLoss", label_smooth_val=0.1, mode="original"),
        init_cfg=dict(type="TruncNormal", layer="Linear", std=0.02),
    ),
    train_cfg=dict(augments=[dict(type="Mixup", alpha=0.8), dict(type="CutMix", alpha=1.0)]),
)
