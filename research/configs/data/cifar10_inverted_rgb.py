# A sensor of one band, inverted, of 16 levels; tokens of the photographs in color.
_base_ = "cifar10_held_out.py"

custom_imports = dict(imports=["lab.sensors"])
load = [dict(type="LoadImageFromFile"), dict(type="mapet_mm.Sensor", kind="inverted")]
