_base_ = [
    "../../_base_/models/vit-base-p16_finetune.py",
    "../../_base_/datasets/imagenet_finetune.py",
    "../../_base_/schedules/finetune_adamw.py",
    "../../_base_/default_runtime.py",
]

train_dataloader = dict(batch_size=64)

optim_wrapper = dict(optimizer=dict(lr=5e-4), paramwise_cfg=dict(layer_decay_rate=0.65))

param_scheduler = [
    dict(type="LinearLR", start_factor=1e-6 / 5e-4, begin=0, end=21, by_epoch=True),
    # From the peak onto the cosine: r + (1 - r) * (1 + cos(pi * 20 / 100)) / 2 with r = 1e-6 / 5e-4.
    dict(type="MultiStepLR", milestones=[20], gamma=0.9046995, begin=0, end=21, by_epoch=True),
    dict(
        type="CosineAnnealingLR",
        eta_min_ratio=1e-6 / 5e-4,
        T_max=100,
        last_step=20,
        begin=21,
        end=101,
        by_epoch=True,
    ),
]

train_cfg = dict(by_epoch=True, max_epochs=110)
