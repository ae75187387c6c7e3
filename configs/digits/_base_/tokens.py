# Classifiers of tokens on the digits, for a batch of 64.
_base_ = "runtime.py"

optim_wrapper = dict(
    constructor="mapet_mm.LayerDecayOptimWrapperConstructor",
    optimizer=dict(type="AdamW", fused=True, lr=3e-3, weight_decay=0.05),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, begin=0, end=2, by_epoch=True, convert_to_iter_based=True),
    dict(type="CosineAnnealingLR", eta_min=0.0, begin=2, end=20, by_epoch=True, convert_to_iter_based=True),
]
train_cfg = dict(by_epoch=True, max_epochs=20, val_interval=5)
