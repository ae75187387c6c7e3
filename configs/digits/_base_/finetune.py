# Fine-tuning of ViT-micro: mean of the patch tokens -> LayerNorm -> linear, with layer-wise decay.
# The checkpoint goes into `model.backbone.init_cfg.checkpoint` (--cfg-options).
_base_ = ["vit-micro-p4.py", "digits_labels.py", "runtime.py"]

model = dict(
    type="ImageClassifier",
    backbone=dict(
        type="mapet_mm.MaPeTViT",
        arch=_base_.arch,
        img_size=24,
        patch_size=4,
        drop_path_rate=0.1,
        out_type="avg_featmap",
        final_norm=False,
        init_cfg=dict(type="Pretrained", checkpoint="", prefix="backbone."),
    ),
    head=dict(
        type="LinearClsHead",
        num_classes=10,
        in_channels=96,
        loss=dict(type="LabelSmoothLoss", label_smooth_val=0.1, mode="original"),
        init_cfg=dict(type="TruncNormal", layer="Linear", std=0.02),
    ),
)

optim_wrapper = dict(
    constructor="mapet_mm.LayerDecayOptimWrapperConstructor",
    paramwise_cfg=dict(layer_decay_rate=0.75),
    optimizer=dict(type="AdamW", fused=True, lr=1e-3, weight_decay=0.05),
)
val_cfg = dict()
test_cfg = dict()
