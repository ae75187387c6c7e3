# The tokenizer runs in the model: at least 246 hours of an A100 for 300 epochs, three times the training,
# computed and not measured (docs/performance.md, "On paper").
_base_ = "../mapet/mapet_vit-base-p16_kclip-online_64xb32-amp-coslr-300e_in1k.py"

model = dict(backbone=dict(objective="mim", cutting_point=122))
