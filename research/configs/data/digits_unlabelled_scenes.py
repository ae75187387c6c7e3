# Scenes of digits without labels, for pre-training; the labelled ones of the digits to evaluate on.
_base_ = "digits_with_scenes.py"

data_set = "digits_unlabelled_scenes"
work_root = "work_dirs/digits_unlabelled_scenes"
data_root = "data/digits_scenes_unlabelled"

load = [dict(type="LoadImageFromFile"), dict(type="CenterCrop", crop_size=32)]
img_size = 32
warmup_epochs = 1
pretrain_epochs = 8  # of 3,000 scenes: as many images in all as a pre-training on the digits
unlabelled = dict(type="CustomDataset", data_root=data_root, with_label=False)
train_images = dict(_delete_=True, data_prefix="train", **unlabelled)
few_images = dict(_delete_=True, data_prefix="train", **unlabelled)
val_images = dict(_delete_=True, data_prefix="val", **unlabelled)
