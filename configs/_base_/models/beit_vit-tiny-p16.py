_base_ = "beit_vit-base-p16.py"

model = dict(backbone=dict(arch="deit-tiny"), head=dict(embed_dims=192))
