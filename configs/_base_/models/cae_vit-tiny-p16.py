_base_ = "cae_vit-base-p16.py"

model = dict(backbone=dict(arch="deit-tiny"), neck=dict(encoder_dims=192))
