# ViTPose for COCO's key points, by MMPose's schedule.
_base_ = [
    "../_base_/models/vitpose_vit-base-p16.py",
    "../_base_/datasets/coco_pose_256x192.py",
    "../_base_/default_runtime_pose.py",
]

default_hooks = dict(checkpoint=dict(interval=10, save_best="coco/AP", rule="greater"))

optim_wrapper = dict(
    type="OptimWrapper",
    constructor="mapet_mm.LayerDecayOptimWrapperConstructor",
    paramwise_cfg=dict(layer_decay_rate=0.75),
    optimizer=dict(type="AdamW", fused=True, lr=5e-4, betas=(0.9, 0.999), weight_decay=0.1),
    clip_grad=dict(max_norm=1.0, norm_type=2),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, begin=0, end=500, by_epoch=False),
    dict(type="MultiStepLR", begin=0, end=210, milestones=[170, 200], gamma=0.1, by_epoch=True),
]
train_cfg = dict(type="EpochBasedTrainLoop", max_epochs=210, val_interval=10)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")

auto_scale_lr = dict(base_batch_size=512)
