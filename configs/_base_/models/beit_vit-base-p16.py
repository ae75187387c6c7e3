# MMPretrain's BEiT as a plain ViT-B/16: absolute positions, no relative position bias, biases for q, k and v.
model = dict(
    type="BEiT",
    backbone=dict(
        type="BEiTPretrainViT",
        arch="deit-base",
        img_size=224,
        patch_size=16,
        drop_path_rate=0.1,
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
    head=dict(type="mapet_mm.BEiTTokenHead", embed_dims=768, vocab_size=8192, max_masked=75),
    target_generator=dict(type="mapet_mm.PrecomputedTokens", vocab_size=8192),
)

# What to run after the training.
next_config = "configs/mapet/benchmarks/vit-base-p16_16xb64-amp-coslr-100e_in1k.py"
