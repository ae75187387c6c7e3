_base_ = [
    "../../_base_/models/vit-tiny-p16_finetune.py",
    "../../_base_/datasets/imagenet_finetune.py",
    "../../_base_/schedules/finetune_adamw.py",
    "../../_base_/default_runtime.py",
]

train_dataloader = dict(batch_size=256)

optim_wrapper = dict(optimizer=dict(lr=2.5e-4))  # no layer-wise decay for this size

param_scheduler = [
    dict(type="LinearLR", start_factor=1e-6 / 2.5e-4, begin=0, end=21, by_epoch=True),
    # From the peak onto the cosine: r + (1 - r) * (1 + cos(pi * 20 / 300)) / 2 with r = 1e-6 / 2.5e-4.
    dict(type="MultiStepLR", milestones=[20], gamma=0.9891175, begin=0, end=21, by_epoch=True),
    dict(
        type="CosineAnnealingLR",
        eta_min_ratio=1e-6 / 2.5e-4,
        T_max=300,
        last_step=20,
        begin=21,
        end=301,
        by_epoch=True,
    ),
]

train_cfg = dict(by_epoch=True, max_epochs=310)
