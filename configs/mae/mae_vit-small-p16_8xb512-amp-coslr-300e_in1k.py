_base_ = [
    "../_base_/models/mae_vit-small-p16.py",
    "../_base_/datasets/imagenet_crops.py",
    "../_base_/schedules/mae_adamw_coslr-300e.py",
    "../_base_/default_runtime.py",
]

train_dataloader = dict(batch_size=512)
custom_hooks = [dict(_base_.knn_probe, interval=30)]
