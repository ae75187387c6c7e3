# A sensor of five bands, mixed from red, green and blue; tokens of its own pictures. Half of the images.
_base_ = "cifar10.py"

data_set = "cifar10_five"
work_root = "work_dirs/cifar10_five"
custom_imports = dict(imports=["lab.sensors"])
load = [dict(type="LoadImageFromFile"), dict(type="mapet_mm.Sensor", kind="five")]
token_load = [*load, dict(type="mapet_mm.FirstBands")]
mean = [127.5]
std = [63.75]
train_images = dict(ann_file="meta/train_17500.txt")
