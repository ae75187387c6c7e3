# MMPretrain's BEiT as a plain ViT: absolute positions, no relative position bias, biases for q, k and v.
_base_ = ["_base_/vit-micro-p4.py", "_base_/digits_tokens_mask-14.py", "_base_/pretrain.py"]

model = dict(
    type="BEiT",
    backbone=dict(
        type="BEiTPretrainViT",
        arch=_base_.arch,
        img_size=24,
        patch_size=4,
        layer_scale_init_value=0.1,
        use_abs_pos_emb=True,
        use_rel_pos_bias=False,
        use_shared_rel_pos_bias=False,
        layer_cfgs=dict(bias=True),
        init_cfg=[
            dict(type="TruncNormal", layer=["Linear", "Conv2d"], std=0.02),
            dict(type="Constant", layer="LayerNorm", val=1.0, bias=0.0),
        ],
    ),
    neck=None,
    head=dict(type="mapet_mm.BEiTTokenHead", embed_dims=96, vocab_size=128, max_masked=14),
    target_generator=dict(type="mapet_mm.PrecomputedTokens", vocab_size=128),
)
