_base_ = [
    "../_base_/models/mask-rcnn_vit-base-p16.py",
    "../_base_/datasets/coco_lsj_1024.py",
    "../_base_/default_runtime_det.py",
]

optim_wrapper = dict(
    type="OptimWrapper",
    constructor="mapet_mm.LayerDecayOptimWrapperConstructor",
    paramwise_cfg=dict(layer_decay_rate=0.7),
    optimizer=dict(type="AdamW", fused=True, lr=1e-4, betas=(0.9, 0.999), weight_decay=0.1),
)
# ViTDet's 184,375 iterations of 64 images are 100 epochs; it divides the rate after 88.9 and 96.3 of them.
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, begin=0, end=250, by_epoch=False),
    dict(type="MultiStepLR", begin=0, end=100, milestones=[89, 96], gamma=0.1, by_epoch=True),
]
train_cfg = dict(type="EpochBasedTrainLoop", max_epochs=100, val_interval=10)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")

auto_scale_lr = dict(base_batch_size=64)
