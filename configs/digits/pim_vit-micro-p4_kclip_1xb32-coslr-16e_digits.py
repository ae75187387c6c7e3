_base_ = "mapet_vit-micro-p4_kclip_1xb32-coslr-16e_digits.py"

model = dict(backbone=dict(objective="pim"))
