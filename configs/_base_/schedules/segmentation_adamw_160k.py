# The paper's hyper-parameters for semantic segmentation, for a batch of 16.
optim_wrapper = dict(
    type="mapet_mm.AutocastOptimWrapper",
    constructor="mapet_mm.LayerDecayOptimWrapperConstructor",
    paramwise_cfg=dict(layer_decay_rate=0.75),
    optimizer=dict(type="AdamW", fused=True, lr=5e-5, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.05),
)

param_scheduler = [
    dict(type="LinearLR", start_factor=5e-11 / 5e-5, begin=0, end=1500, by_epoch=False),
    dict(type="PolyLR", power=1.0, eta_min=0.0, begin=1500, end=160000, by_epoch=False),
]

train_cfg = dict(type="IterBasedTrainLoop", max_iters=160000, val_interval=16000)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")

auto_scale_lr = dict(base_batch_size=16)
