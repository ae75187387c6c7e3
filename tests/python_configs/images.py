"""Configs in MMEngine's Python style, of classes instead of names: the images, `data/{train,val}/CLASS/`."""

from mmcv.transforms import LoadImageFromFile
from mmpretrain.datasets import CenterCrop, CustomDataset, ResizeEdge

resize = dict(type=ResizeEdge, scale=64, edge="short", backend="pillow", interpolation="bicubic")
load = [dict(type=LoadImageFromFile), resize, dict(type=CenterCrop, crop_size=64)]
train_images = dict(type=CustomDataset, data_root="data", data_prefix="train")
val_images = dict(type=CustomDataset, data_root="data", data_prefix="val")
