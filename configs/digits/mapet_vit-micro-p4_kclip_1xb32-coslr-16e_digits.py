_base_ = ["_base_/vit-micro-p4.py", "_base_/digits_tokens.py", "_base_/runtime.py"]

model = dict(
    type="mapet_mm.MaPeT",
    backbone=dict(
        type="mapet_mm.MaPeTPretrainViT",
        arch=_base_.arch,
        img_size=24,
        patch_size=4,
        objective="mapet",
        cutting_point=11,  # 70 % of the sequence are targets, as the paper prefers
    ),
    head=dict(type="mapet_mm.TokenPredictionHead", embed_dims=96, vocab_size=128),
    target_generator=dict(type="mapet_mm.PrecomputedTokens", vocab_size=128),
)

train_dataloader = dict(batch_size=32)

optim_wrapper = dict(
    constructor="mapet_mm.LayerDecayOptimWrapperConstructor",
    optimizer=dict(type="AdamW", lr=3e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.05),
    clip_grad=dict(max_norm=3.0),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, begin=0, end=2, by_epoch=True, convert_to_iter_based=True),
    dict(type="CosineAnnealingLR", eta_min=1e-5, begin=2, end=16, by_epoch=True, convert_to_iter_based=True),
]
default_hooks = dict(checkpoint=dict(interval=4, max_keep_ckpts=1))
train_cfg = dict(by_epoch=True, max_epochs=16, val_interval=2)
val_cfg = dict()
test_cfg = dict()
auto_scale_lr = dict(base_batch_size=32)
