# Fine-tuning of ViT-micro: mean of the patch tokens -> LayerNorm -> linear, with layer-wise decay.
# The checkpoint goes into `model.backbone.init_cfg.checkpoint` (--cfg-options).
_base_ = ["vit-micro.py", "labels.py", "runtime.py"]

model = dict(
    type="ImageClassifier",
    backbone=dict(
        type="mapet_mm.MaPeTViT",
        arch=_base_.arch,
        img_size=_base_.img_size,
        patch_size=_base_.patch_size,
        drop_path_rate=0.1,
        out_type="avg_featmap",
        final_norm=False,
        init_cfg=dict(type="Pretrained", checkpoint="", prefix="backbone."),
    ),
    head=dict(
        type="LinearClsHead",
        num_classes=_base_.num_classes,
        in_channels=_base_.arch.embed_dims,
        loss=dict(type="LabelSmoothLoss", label_smooth_val=0.1, mode="original"),
        init_cfg=dict(type="TruncNormal", layer="Linear", std=0.02),
    ),
)

optim_wrapper = dict(
    constructor="mapet_mm.LayerDecayOptimWrapperConstructor",
    paramwise_cfg=dict(layer_decay_rate=0.75),
    optimizer=dict(type="AdamW", fused=True, lr=1e-3, weight_decay=0.05),
)
warmup = dict(type="LinearLR", start_factor=1e-3, begin=0, by_epoch=True, convert_to_iter_based=True)
cosine = dict(type="CosineAnnealingLR", eta_min=0.0, by_epoch=True, convert_to_iter_based=True)
val_cfg = dict()
test_cfg = dict()
