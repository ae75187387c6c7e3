# The digits with pixel labels, instead of scenes: segmentation of the images that are pre-trained on.
_base_ = "digits.py"

data_set = "digits_pixels"
work_root = "work_dirs/digits_pixels"

few_scenes, all_scenes = 100, 1437
scene_crop = 24
train_scenes = dict(data_root="data/digits_pixels")
val_scenes = dict(data_root="data/digits_pixels")
