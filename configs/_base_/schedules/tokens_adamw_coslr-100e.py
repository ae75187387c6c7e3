# Classifiers of tokens, for a batch of 1024. The paper gives no schedule for them: this one is our choice,
# with the optimizer of its fine-tuning.
optim_wrapper = dict(
    type="mapet_mm.AutocastOptimWrapper",
    constructor="mapet_mm.LayerDecayOptimWrapperConstructor",
    optimizer=dict(type="AdamW", fused=True, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.05),
)

param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, begin=0, end=5, by_epoch=True, convert_to_iter_based=True),
    dict(type="CosineAnnealingLR", eta_min=1e-6, begin=5, end=100, by_epoch=True, convert_to_iter_based=True),
]

train_cfg = dict(by_epoch=True, max_epochs=100, val_interval=5)
val_cfg = dict()
test_cfg = dict()

auto_scale_lr = dict(base_batch_size=1024)
