# No pre-training: from random weights as DeiT, without layer-wise decay, for as many epochs as a pre-training
# and its fine-tuning have together.
_base_ = "_base_/finetune.py"

model = dict(backbone=dict(init_cfg=None))

optim_wrapper = dict(paramwise_cfg=dict(_delete_=True))
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, begin=0, end=2, by_epoch=True, convert_to_iter_based=True),
    dict(type="CosineAnnealingLR", eta_min=0.0, begin=2, end=36, by_epoch=True, convert_to_iter_based=True),
]
train_cfg = dict(by_epoch=True, max_epochs=36, val_interval=6)
