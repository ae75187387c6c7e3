_base_ = "mapet_vit-micro-p4_kclip_1xb32-coslr-16e_digits.py"

# 14 of the 36 patches are masked at random, the number nearest to ImageNet's share (75 of 196, 38 %).
model = dict(backbone=dict(objective="mim", cutting_point=23))
