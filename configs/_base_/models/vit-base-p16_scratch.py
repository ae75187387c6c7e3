# DeiT-B/16 from random weights: the class token after the final norm -> linear, no LayerScale.
_base_ = "vit-base-p16_finetune.py"

model = dict(
    backbone=dict(layer_scale_init_value=0.0, out_type="cls_token", final_norm=True, init_cfg=None),
)
