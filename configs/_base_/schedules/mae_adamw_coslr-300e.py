# MAE's hyper-parameters for a batch of 4096: 1.5e-4 for 256 images.
optim_wrapper = dict(
    type="mapet_mm.AutocastOptimWrapper",
    constructor="mapet_mm.LayerDecayOptimWrapperConstructor",  # no weight decay where the method has none
    optimizer=dict(type="AdamW", fused=True, lr=2.4e-3, betas=(0.9, 0.95), weight_decay=0.05),
)

param_scheduler = [
    dict(type="LinearLR", start_factor=1e-4, begin=0, end=40, by_epoch=True, convert_to_iter_based=True),
    dict(type="CosineAnnealingLR", begin=40, end=300, by_epoch=True, convert_to_iter_based=True),
]

train_cfg = dict(by_epoch=True, max_epochs=300)

# The rates above belong to this total batch; `--auto-scale-lr` follows another one linearly.
auto_scale_lr = dict(base_batch_size=4096)
