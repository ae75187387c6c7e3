# Pre-training on the digits for all methods, for a batch of 32.
_base_ = "runtime.py"

optim_wrapper = dict(
    constructor="mapet_mm.LayerDecayOptimWrapperConstructor",
    optimizer=dict(type="AdamW", fused=True, lr=3e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.05),
    clip_grad=dict(max_norm=3.0),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, begin=0, end=2, by_epoch=True, convert_to_iter_based=True),
    dict(type="CosineAnnealingLR", eta_min=1e-5, begin=2, end=16, by_epoch=True, convert_to_iter_based=True),
]
default_hooks = dict(checkpoint=dict(interval=4, max_keep_ckpts=2))
train_cfg = dict(by_epoch=True, max_epochs=16, val_interval=2)
auto_scale_lr = dict(base_batch_size=32)
