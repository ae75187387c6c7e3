# The digits' images for a tokenizer; the tokenizer's config gives the pipeline and the token store.
default_scope = "mmpretrain"

data_root = "data/digits"
train_images = dict(type="CustomDataset", data_root=data_root, data_prefix="train", ann_file="meta/train.txt")
val_images = dict(type="CustomDataset", data_root=data_root, data_prefix="val", ann_file="meta/val.txt")
load = dict(type="LoadImageFromFile")
pack = dict(type="PackInputs")
dataloader = dict(num_workers=2)
