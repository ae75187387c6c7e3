_base_ = "vit-base-p16_scratch.py"

model = dict(backbone=dict(arch="deit-tiny"), head=dict(in_channels=192))
