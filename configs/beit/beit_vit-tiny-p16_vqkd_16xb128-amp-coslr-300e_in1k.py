_base_ = [
    "../_base_/models/beit_vit-tiny-p16.py",
    "../_base_/datasets/imagenet_tokens_vqkd_mask-75.py",
    "../_base_/schedules/pretrain_adamw_coslr-300e.py",
    "../_base_/default_runtime.py",
]

train_dataloader = dict(batch_size=128)
