_base_ = "upernet_vit-base-p16.py"

model = dict(
    backbone=dict(arch="deit-tiny"),
    neck=dict(embed_dim=192),
    decode_head=dict(in_channels=[192, 192, 192, 192], channels=192),
    auxiliary_head=dict(in_channels=192),
)
