_base_ = "mapet_vit-micro-p4_kclip_1xb32-coslr-16e_digits.py"

# 14 of the 36 patches (39 %) are masked, at random.
model = dict(backbone=dict(objective="mim", cutting_point=23))
