_base_ = [
    "../../_base_/models/vit-base-p16_finetune.py",
    "../../_base_/datasets/imagenet_finetune.py",
    "../../_base_/schedules/finetune_adamw.py",
    "../../_base_/default_runtime.py",
]

train_dataloader = dict(batch_size=64)

optim_wrapper = dict(optimizer=dict(lr=5e-4), paramwise_cfg=dict(layer_decay_rate=0.65))

param_scheduler = [
    dict(
        type="LinearLR",
        start_factor=1e-6 / 5e-4,
        begin=0,
        end=20,
        by_epoch=True,
        convert_to_iter_based=True,
    ),
    dict(
        type="CosineAnnealingLR",
        eta_min_ratio=1e-6 / 5e-4,
        begin=20,
        end=100,
        by_epoch=True,
        convert_to_iter_based=True,
    ),
]

train_cfg = dict(by_epoch=True, max_epochs=100)
