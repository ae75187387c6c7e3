_base_ = [
    "../_base_/models/mapet_vit-base-p16.py",
    "../_base_/datasets/imagenet_stored_kclip.py",
    "../_base_/schedules/pretrain_adamw_coslr-300e.py",
    "../_base_/default_runtime.py",
]

train_dataloader = dict(batch_size=32)
