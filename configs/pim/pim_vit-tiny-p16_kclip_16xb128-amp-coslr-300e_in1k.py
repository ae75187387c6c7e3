_base_ = "../mapet/mapet_vit-tiny-p16_kclip_16xb128-amp-coslr-300e_in1k.py"

model = dict(backbone=dict(objective="pim"))
