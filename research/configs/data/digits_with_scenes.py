# The digits, with scenes to segment instead of single digits: those of research/converters/digits_scenes.py.
_base_ = "../../../configs/micro/_base_/data/digits.py"

few_scenes, all_scenes = 50, 400
scene_crop = 48
train_scenes = dict(data_root="data/digits_scenes")
val_scenes = dict(data_root="data/digits_scenes")
