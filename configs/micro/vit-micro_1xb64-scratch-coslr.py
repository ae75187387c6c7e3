# No pre-training: from random weights as DeiT, without layer-wise decay.
_base_ = "_base_/finetune.py"

model = dict(backbone=dict(init_cfg=None))

optim_wrapper = dict(paramwise_cfg=dict(_delete_=True))
param_scheduler = [
    dict(end=_base_.warmup_epochs, **_base_.warmup),
    dict(begin=_base_.warmup_epochs, end=_base_.scratch_epochs, **_base_.cosine),
]
train_cfg = dict(by_epoch=True, max_epochs=_base_.scratch_epochs, val_interval=6)
