_base_ = "../mapet/mapet_vit-base-p16_vqkd_64xb32-amp-coslr-300e_in1k.py"

model = dict(backbone=dict(objective="pim"))
