# A sensor of one band, inverted, of 16 levels; tokens of its own pictures. Half of the training images.
_base_ = "cifar10.py"

data_set = "cifar10_inverted"
work_root = "work_dirs/cifar10_inverted"
custom_imports = dict(imports=["lab.sensors"])
load = [dict(type="LoadImageFromFile"), dict(type="mapet_mm.Sensor", kind="inverted")]
token_load = load
train_images = dict(ann_file="meta/train_17500.txt")
