_base_ = "_base_/finetune.py"

train_dataloader = dict(
    batch_size=50,
    dataset=dict(_delete_=True, pipeline=[*_base_.load, _base_.crop, _base_.pack], **_base_.few_images),
)

param_scheduler = [
    dict(end=5, **_base_.warmup),
    dict(begin=5, end=_base_.few_finetune_epochs, **_base_.cosine),
]
train_cfg = dict(by_epoch=True, max_epochs=_base_.few_finetune_epochs, val_interval=40)
