_base_ = "mapet_vit-micro_kclip_1xb32-coslr.py"

model = dict(backbone=dict(objective="pim"))
