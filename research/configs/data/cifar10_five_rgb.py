# A sensor of five bands, mixed from red, green and blue; tokens of the photographs in color.
_base_ = "cifar10_held_out.py"

custom_imports = dict(imports=["lab.sensors"])
load = [dict(type="LoadImageFromFile"), dict(type="mapet_mm.Sensor", kind="five")]
mean = [127.5]
std = [63.75]
