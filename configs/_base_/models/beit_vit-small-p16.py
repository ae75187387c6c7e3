_base_ = "beit_vit-base-p16.py"

model = dict(backbone=dict(arch="deit-small"), head=dict(embed_dims=384))
