# VQ-KD, BEiT v2's tokenizer, as MMPretrain has it, at 224 px. Published weights; a local file goes into
# `tokenizer.tokenizer.init_cfg.checkpoint` (for one in the model, below `model.target_generator`).
tokenizer = dict(
    type="mapet_mm.FrozenTokenizer",
    image_size=224,
    vocab_size=8192,
    tokenizer=dict(
        type="VQKD",
        encoder_config=dict(
            arch="base",
            img_size=224,
            patch_size=16,
            final_norm=True,
            out_type="featmap",
            use_abs_pos_emb=True,
            use_rel_pos_bias=False,
            use_shared_rel_pos_bias=False,
            layer_scale_init_value=0.0,
        ),
        num_embed=8192,
        embed_dims=32,
        init_cfg=dict(
            type="Pretrained",
            checkpoint="https://mmassets.onedl.ai/mmselfsup/1.x/target_generator_ckpt/vqkd_encoder.pth",
        ),
    ),
)
tokenizer_mean = [127.5, 127.5, 127.5]
tokenizer_std = [127.5, 127.5, 127.5]
tokenizer_square = [
    dict(type="ResizeEdge", scale=224, edge="short", backend="pillow", interpolation="bicubic"),
    dict(type="CenterCrop", crop_size=224),
]
