# A sensor of one band, the brightness; tokens of its own pictures. Half of the training images.
_base_ = "cifar10.py"

data_set = "cifar10_band"
work_root = "work_dirs/cifar10_band"
custom_imports = dict(imports=["lab.sensors"])
load = [dict(type="LoadImageFromFile"), dict(type="mapet_mm.Sensor", kind="band")]
token_load = load
train_images = dict(ann_file="meta/train_17500.txt")
