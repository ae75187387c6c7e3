# ImageNet-1k as DeiT trains on it: timm's RandAugment `inc1`, repeated augmentation (an epoch is a third of
# the images in three versions each), and a test crop 256 -> 224. The rest is fine-tuning's.
_base_ = "imagenet_finetune.py"

rand_augment = dict(_base_.rand_augment, policies="timm_increasing")
train_pipeline = [*_base_.load_cropped, rand_augment, _base_.erasing, _base_.pack]

test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="ResizeEdge", scale=256, edge="short", backend="pillow", interpolation="bicubic"),
    dict(type="CenterCrop", crop_size=224),
    _base_.pack,
]

train_dataloader = dict(
    sampler=dict(_delete_=True, type="RepeatAugSampler", num_repeats=3, shuffle=True),
    dataset=dict(pipeline=train_pipeline),
)
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
