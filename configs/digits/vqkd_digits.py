# MMPretrain's VQ-KD for the embedded digits: a small one with fixed random weights, so nothing is downloaded.
_base_ = "_base_/digits_images.py"

token_store = "work_dirs/digits/tokens_vqkd"

tokenizer = dict(
    type="mapet_mm.FrozenTokenizer",
    image_size=24,
    vocab_size=128,
    random_seed=0,
    tokenizer=dict(
        type="VQKD",
        encoder_config=dict(
            arch=dict(embed_dims=48, num_layers=2, num_heads=3, feedforward_channels=96),
            img_size=24,
            patch_size=4,
            final_norm=True,
            out_type="featmap",
            use_abs_pos_emb=True,
            use_rel_pos_bias=False,
            layer_scale_init_value=0.0,
        ),
        num_embed=128,
        embed_dims=8,
        quantize_kmeans_init=False,
    ),
)
data_preprocessor = dict(
    type="SelfSupDataPreprocessor", mean=[127.5, 127.5, 127.5], std=[127.5, 127.5, 127.5], to_rgb=True
)

resize = dict(type="ResizeEdge", scale=24, edge="short", backend="pillow", interpolation="bicubic")
pipeline = [_base_.load, resize, _base_.pack]
dataset = [
    dict(pipeline=pipeline, **_base_.train_images),
    dict(pipeline=pipeline, **_base_.val_images),
]

# What to run after the extraction.
next_config = "configs/digits/token-mlp_vqkd_1xb64-coslr-20e_digits.py"
