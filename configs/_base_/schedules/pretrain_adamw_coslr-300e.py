# The paper's hyper-parameters for pre-training, for a batch of 2048.
optim_wrapper = dict(
    type="mapet_mm.AutocastOptimWrapper",
    constructor="mapet_mm.LayerDecayOptimWrapperConstructor",  # no weight decay where the method has none
    optimizer=dict(type="AdamW", fused=True, lr=1.5e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.05),
    clip_grad=dict(max_norm=3.0),
)

# timm's curve, as the authors train: one rate for each epoch, the warm-up in place of the first ten epochs of
# a cosine that counts from epoch 0, and ten more epochs at the minimal rate.
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-6 / 1.5e-3, begin=0, end=11, by_epoch=True),
    # From the peak onto the cosine: r + (1 - r) * (1 + cos(pi * 10 / 300)) / 2 with r = 1e-5 / 1.5e-3.
    dict(type="MultiStepLR", milestones=[10], gamma=0.9972792, begin=0, end=11, by_epoch=True),
    dict(
        type="CosineAnnealingLR",
        eta_min_ratio=1e-5 / 1.5e-3,
        T_max=300,
        last_step=10,
        begin=11,
        end=301,
        by_epoch=True,
    ),
]

train_cfg = dict(by_epoch=True, max_epochs=310, val_interval=10)

# The rates above belong to this total batch; `--auto-scale-lr` follows another one linearly.
auto_scale_lr = dict(base_batch_size=2048)
