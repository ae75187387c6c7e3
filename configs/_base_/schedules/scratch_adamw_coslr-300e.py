# DeiT's hyper-parameters, for a batch of 1024: no pre-training, so no layer-wise decay.
optim_wrapper = dict(
    type="mapet_mm.AutocastOptimWrapper",
    constructor="mapet_mm.LayerDecayOptimWrapperConstructor",  # no weight decay where DeiT has none
    optimizer=dict(type="AdamW", fused=True, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.05),
)

param_scheduler = [
    dict(
        type="LinearLR",
        start_factor=1e-6 / 1e-3,
        begin=0,
        end=5,
        by_epoch=True,
        convert_to_iter_based=True,
    ),
    dict(
        type="CosineAnnealingLR",
        eta_min_ratio=1e-5 / 1e-3,
        begin=5,
        end=300,
        by_epoch=True,
        convert_to_iter_based=True,
    ),
]

train_cfg = dict(by_epoch=True, max_epochs=300)
val_cfg = dict()
test_cfg = dict()

auto_scale_lr = dict(base_batch_size=1024)
