# The paper's hyper-parameters for pre-training, for a batch of 2048.
optim_wrapper = dict(
    type="mapet_mm.AutocastOptimWrapper",
    constructor="mapet_mm.LayerDecayOptimWrapperConstructor",  # no weight decay where the method has none
    optimizer=dict(type="AdamW", fused=True, lr=1.5e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.05),
    clip_grad=dict(max_norm=3.0),
)

param_scheduler = [
    dict(
        type="LinearLR",
        start_factor=1e-6 / 1.5e-3,
        begin=0,
        end=10,
        by_epoch=True,
        convert_to_iter_based=True,
    ),
    dict(
        type="CosineAnnealingLR",
        eta_min_ratio=1e-5 / 1.5e-3,
        begin=10,
        end=300,
        by_epoch=True,
        convert_to_iter_based=True,
    ),
]

train_cfg = dict(by_epoch=True, max_epochs=300, val_interval=10)

# The rates above belong to this total batch; `--auto-scale-lr` follows another one linearly.
auto_scale_lr = dict(base_batch_size=2048)
