# The tokenizer runs in the model: no token store, and a pass of CLIP RN50x64 for each image and epoch. 300
# epochs take 335 hours of an H200, computed from measured rates; with stored tokens they take 110
# (docs/performance.md).
_base_ = [
    "../_base_/models/mapet_vit-base-p16.py",
    "../_base_/datasets/imagenet_online_kclip.py",
    "../_base_/schedules/pretrain_adamw_coslr-300e.py",
    "../_base_/default_runtime.py",
]

model = dict(target_generator=dict(_delete_=True, **_base_.tokenizer))
train_dataloader = dict(batch_size=32)
