_base_ = "_base_/finetune.py"

param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, begin=0, end=2, by_epoch=True, convert_to_iter_based=True),
    dict(type="CosineAnnealingLR", eta_min=0.0, begin=2, end=20, by_epoch=True, convert_to_iter_based=True),
]
train_cfg = dict(by_epoch=True, max_epochs=20, val_interval=5)
