_base_ = "../mapet/mapet_vit-base-p16_kclip_64xb32-amp-coslr-300e_in1k.py"

# 75 of the 196 patches are masked, as by BEiT, but at random.
model = dict(backbone=dict(objective="mim", cutting_point=122))
