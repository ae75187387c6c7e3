# No pre-training, few labels: from random weights, without layer-wise decay.
_base_ = "vit-micro_1xb50-coslr_few-labels.py"

# On digits as many images as in a pre-training and its fine-tuning together: 16 x 1,437 + 120 x 100.
scratch_epochs = 350

model = dict(backbone=dict(init_cfg=None))

optim_wrapper = dict(paramwise_cfg=dict(_delete_=True))
param_scheduler = [
    dict(end=5, **_base_.warmup),
    dict(begin=5, end=scratch_epochs, **_base_.cosine),
]
train_cfg = dict(max_epochs=scratch_epochs, val_interval=50)
