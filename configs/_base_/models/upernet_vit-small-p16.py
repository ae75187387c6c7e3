_base_ = "upernet_vit-base-p16.py"

model = dict(
    backbone=dict(arch="deit-small"),
    neck=dict(embed_dim=384),
    decode_head=dict(in_channels=[384, 384, 384, 384], channels=384),
    auxiliary_head=dict(in_channels=384),
)
