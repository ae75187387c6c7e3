_base_ = "mapet_vit-base-p16.py"

model = dict(backbone=dict(arch="deit-tiny", cutting_point=50), head=dict(embed_dims=192))
