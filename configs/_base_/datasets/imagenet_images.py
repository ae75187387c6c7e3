# ImageNet-1k's images for a tokenizer; the tokenizer's config gives the pipeline and the token store.
default_scope = "mmpretrain"

data_root = "data/imagenet"
train_images = dict(type="ImageNet", data_root=data_root, split="train")
val_images = dict(type="ImageNet", data_root=data_root, split="val")
load = dict(type="LoadImageFromFile")  # as in training: pillow reads 16 bits and transparency otherwise
pack = dict(type="PackInputs")
dataloader = dict(num_workers=8)
