# MMPretrain's CAE on a plain ViT-B/16 (fixed sine-cosine positions, biases for q, k and v). Regressor and
# decoder have the encoder's width and heads, as in CAE's own recipes: nothing has to be projected.
model = dict(
    type="mapet_mm.ProjectedCAE",
    backbone=dict(
        type="CAEPretrainViT",
        arch="deit-base",
        img_size=224,
        patch_size=16,
        drop_path_rate=0.1,
        layer_scale_init_value=0.1,
        bias=True,
    ),
    neck=dict(
        type="mapet_mm.ProjectedCAENeck",
        encoder_dims=768,
        embed_dims=768,
        num_heads=12,
        regressor_depth=4,
        decoder_depth=4,
        drop_path_rate=0.1,
        layer_scale_init_value=0.1,
        mask_tokens_num=98,
        num_classes=8192,
    ),
    head=dict(type="mapet_mm.CAETokenHead", loss=dict(type="CAELoss", lambd=2)),
    target_generator=dict(type="mapet_mm.PrecomputedTokens", vocab_size=8192),
    base_momentum=0.0,
)

# MMPretrain's CAE freezes its teacher after the model is wrapped for several processes.
find_unused_parameters = True

# What to run after the training.
next_config = "configs/mapet/benchmarks/vit-base-p16_16xb64-amp-coslr-100e_in1k.py"
