# Pre-training for all methods, for a batch of 32.
_base_ = ["vit-micro.py", "stored_tokens.py", "runtime.py"]

optim_wrapper = dict(
    constructor="mapet_mm.LayerDecayOptimWrapperConstructor",
    optimizer=dict(type="AdamW", fused=True, lr=3e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.05),
    clip_grad=dict(max_norm=3.0),
)
warmup = dict(type="LinearLR", start_factor=1e-3, begin=0, by_epoch=True, convert_to_iter_based=True)
cosine = dict(type="CosineAnnealingLR", eta_min=1e-5, by_epoch=True, convert_to_iter_based=True)
param_scheduler = [
    dict(end=_base_.warmup_epochs, **warmup),
    dict(begin=_base_.warmup_epochs, end=_base_.pretrain_epochs, **cosine),
]
default_hooks = dict(checkpoint=dict(interval=4, max_keep_ckpts=2))
train_cfg = dict(by_epoch=True, max_epochs=_base_.pretrain_epochs, val_interval=2)
auto_scale_lr = dict(base_batch_size=32)

# What to run after the training.
next_config = "configs/micro/vit-micro_1xb64-coslr.py"
