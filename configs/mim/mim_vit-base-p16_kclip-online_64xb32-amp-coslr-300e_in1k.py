_base_ = "../mapet/mapet_vit-base-p16_kclip-online_64xb32-amp-coslr-300e_in1k.py"

model = dict(backbone=dict(objective="mim", cutting_point=122))
