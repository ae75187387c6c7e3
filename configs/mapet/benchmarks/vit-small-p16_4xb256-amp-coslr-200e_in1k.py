_base_ = [
    "../../_base_/models/vit-small-p16_finetune.py",
    "../../_base_/datasets/imagenet_finetune.py",
    "../../_base_/schedules/finetune_adamw.py",
    "../../_base_/default_runtime.py",
]

train_dataloader = dict(batch_size=256)

# 5e-3, ten times ViT-B's, is what the paper's table and the authors' configuration say.
optim_wrapper = dict(optimizer=dict(lr=5e-3), paramwise_cfg=dict(layer_decay_rate=0.65))

param_scheduler = [
    dict(type="LinearLR", start_factor=1e-6 / 5e-3, begin=0, end=21, by_epoch=True),
    # From the peak onto the cosine: r + (1 - r) * (1 + cos(pi * 20 / 200)) / 2 with r = 1e-6 / 5e-3.
    dict(type="MultiStepLR", milestones=[20], gamma=0.9755332, begin=0, end=21, by_epoch=True),
    dict(
        type="CosineAnnealingLR",
        eta_min_ratio=1e-6 / 5e-3,
        T_max=200,
        last_step=20,
        begin=21,
        end=201,
        by_epoch=True,
    ),
]

train_cfg = dict(by_epoch=True, max_epochs=210)
