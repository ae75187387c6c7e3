_base_ = [
    "../_base_/models/dino_vit-base-p16.py",
    "../_base_/datasets/coco_lsj_1024.py",
    "../_base_/default_runtime_det.py",
]

# Boxes alone: masks are loaded to fit them to what a cut leaves of an object, and not evaluated.
val_evaluator = dict(metric="bbox")
test_evaluator = val_evaluator

optim_wrapper = dict(
    type="OptimWrapper",
    constructor="mapet_mm.LayerDecayOptimWrapperConstructor",
    paramwise_cfg=dict(layer_decay_rate=0.7),
    optimizer=dict(type="AdamW", fused=True, lr=1e-4, betas=(0.9, 0.999), weight_decay=1e-4),
    clip_grad=dict(max_norm=0.1, norm_type=2),
)
param_scheduler = [dict(type="MultiStepLR", begin=0, end=12, milestones=[11], gamma=0.1, by_epoch=True)]
train_cfg = dict(type="EpochBasedTrainLoop", max_epochs=12, val_interval=1)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")

auto_scale_lr = dict(base_batch_size=16)
