_base_ = "linear-segmentation_vit-base-p16.py"

model = dict(
    backbone=dict(arch="deit-small"),
    neck=dict(channels=384),
    decode_head=dict(in_channels=384, channels=384),
)
