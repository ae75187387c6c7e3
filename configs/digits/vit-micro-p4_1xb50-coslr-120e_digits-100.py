_base_ = "_base_/finetune.py"

train_dataloader = dict(batch_size=50, dataset=dict(ann_file="meta/train_100.txt"))

param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, begin=0, end=5, by_epoch=True, convert_to_iter_based=True),
    dict(type="CosineAnnealingLR", eta_min=0.0, begin=5, end=120, by_epoch=True, convert_to_iter_based=True),
]
train_cfg = dict(by_epoch=True, max_epochs=120, val_interval=40)
