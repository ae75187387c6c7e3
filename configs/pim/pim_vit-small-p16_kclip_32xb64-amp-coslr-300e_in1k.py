_base_ = "../mapet/mapet_vit-small-p16_kclip_32xb64-amp-coslr-300e_in1k.py"

model = dict(backbone=dict(objective="pim"))
