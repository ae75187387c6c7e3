# The paper's linear probe, for a batch of 1024: cosine decay to 0, no warm-up; one step an epoch, as BEiT's.
optim_wrapper = dict(
    type="mapet_mm.AutocastOptimWrapper",
    optimizer=dict(type="AdamW", fused=True, lr=4e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-4),
)

param_scheduler = [dict(type="CosineAnnealingLR", eta_min=0.0, begin=0, end=50, by_epoch=True)]

train_cfg = dict(by_epoch=True, max_epochs=50)
val_cfg = dict()
test_cfg = dict()

auto_scale_lr = dict(base_batch_size=1024)
