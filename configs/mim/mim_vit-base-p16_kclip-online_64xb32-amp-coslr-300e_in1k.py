# The tokenizer runs in the model: 491 hours of an A100 for 300 epochs, several times the training itself,
# computed and not measured (docs/performance.md, "Tokens in the model").
_base_ = "../mapet/mapet_vit-base-p16_kclip-online_64xb32-amp-coslr-300e_in1k.py"

model = dict(backbone=dict(objective="mim", cutting_point=122))
