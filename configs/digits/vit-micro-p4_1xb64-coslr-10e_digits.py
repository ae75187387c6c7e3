_base_ = "_base_/finetune.py"

param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, begin=0, end=1, by_epoch=True, convert_to_iter_based=True),
    dict(type="CosineAnnealingLR", eta_min=0.0, begin=1, end=10, by_epoch=True, convert_to_iter_based=True),
]
train_cfg = dict(by_epoch=True, max_epochs=10, val_interval=5)
