# MMPretrain's BEiT: relative position biases in each layer, no absolute positions.
_base_ = "mapet_vit-micro_kclip_1xb32-coslr.py"

model = dict(backbone=dict(type="mapet_mm.MaPeTPretrainBEiT"))
next_config = None  # no recipe fine-tunes it
