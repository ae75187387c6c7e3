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
    dict(
        type="LinearLR",
        start_factor=1e-6 / 5e-3,
        begin=0,
        end=20,
        by_epoch=True,
        convert_to_iter_based=True,
    ),
    dict(
        type="CosineAnnealingLR",
        eta_min_ratio=1e-6 / 5e-3,
        begin=20,
        end=200,
        by_epoch=True,
        convert_to_iter_based=True,
    ),
]

train_cfg = dict(by_epoch=True, max_epochs=200)
