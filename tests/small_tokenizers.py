"""Configs of MMPretrain's VQ-KD and DALL-E with 16 tokens, in patches of 4 and 8 px."""

DALLE = dict(type="DALL-E", n_hid=8, n_blk_per_group=1, vocab_size=16)
ARCH = dict(embed_dims=24, num_layers=1, num_heads=3, feedforward_channels=48)


def vqkd(image_size: int, **options) -> dict:
    encoder = dict(
        arch=ARCH,
        img_size=image_size,
        patch_size=4,
        final_norm=True,
        out_type="featmap",
        use_abs_pos_emb=True,
        use_rel_pos_bias=False,
        layer_scale_init_value=0.0,
    )
    return dict(type="VQKD", encoder_config=encoder, num_embed=16, embed_dims=8, **options)
