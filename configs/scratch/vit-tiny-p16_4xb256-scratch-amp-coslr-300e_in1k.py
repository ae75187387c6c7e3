_base_ = [
    "../_base_/models/vit-tiny-p16_scratch.py",
    "../_base_/datasets/imagenet_scratch.py",
    "../_base_/schedules/scratch_adamw_coslr-300e.py",
    "../_base_/default_runtime.py",
]

train_dataloader = dict(batch_size=256)
