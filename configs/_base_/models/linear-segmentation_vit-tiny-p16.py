_base_ = "linear-segmentation_vit-base-p16.py"

model = dict(
    backbone=dict(arch="deit-tiny"),
    neck=dict(channels=192),
    decode_head=dict(in_channels=192, channels=192),
)
