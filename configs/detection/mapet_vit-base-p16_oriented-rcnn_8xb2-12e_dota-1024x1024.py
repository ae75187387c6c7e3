# Oriented R-CNN for DOTA, by MMRotate's schedule of 12 epochs; ViTDet's optimiser, because MMRotate's SGD
# is for convolutional networks.
_base_ = [
    "../_base_/models/oriented-rcnn_vit-base-p16.py",
    "../_base_/datasets/dota_1024.py",
    "../_base_/default_runtime_rotated.py",
]

optim_wrapper = dict(
    type="OptimWrapper",
    constructor="mapet_mm.LayerDecayOptimWrapperConstructor",
    paramwise_cfg=dict(layer_decay_rate=0.7),
    optimizer=dict(type="AdamW", fused=True, lr=1e-4, betas=(0.9, 0.999), weight_decay=0.05),
    clip_grad=dict(max_norm=35, norm_type=2),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=1 / 3, begin=0, end=500, by_epoch=False),
    dict(type="MultiStepLR", begin=0, end=12, milestones=[8, 11], gamma=0.1, by_epoch=True),
]
train_cfg = dict(type="EpochBasedTrainLoop", max_epochs=12, val_interval=1)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")

auto_scale_lr = dict(base_batch_size=16)
