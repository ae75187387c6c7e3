_base_ = "vit-base-p16_8xb128-linear-mean-amp-coslr-50e_in1k.py"

model = dict(backbone=dict(arch="deit-tiny"), head=dict(in_channels=192))
