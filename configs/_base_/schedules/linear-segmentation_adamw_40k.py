# DINOv3's settings for linear segmentation, for a batch of 16. Its cosine begins with the warm-up, this one
# after it: the rates differ by half a percent there.
optim_wrapper = dict(
    type="mapet_mm.AutocastOptimWrapper",
    optimizer=dict(type="AdamW", fused=True, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-3),
)

param_scheduler = [
    dict(type="LinearLR", start_factor=1e-6, begin=0, end=1500, by_epoch=False),
    dict(type="CosineAnnealingLR", eta_min=0.0, begin=1500, end=40000, by_epoch=False),
]

train_cfg = dict(type="IterBasedTrainLoop", max_iters=40000, val_interval=5000)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")

auto_scale_lr = dict(base_batch_size=16)
