_base_ = "_base_/finetune.py"

param_scheduler = [
    dict(end=_base_.warmup_epochs, **_base_.warmup),
    dict(begin=_base_.warmup_epochs, end=_base_.finetune_epochs, **_base_.cosine),
]
train_cfg = dict(by_epoch=True, max_epochs=_base_.finetune_epochs, val_interval=5)
