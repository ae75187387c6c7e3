# DALL-E's encoder as MMPretrain has it, at 112 px, resized bicubic as by the authors. Published weights; a
# local file goes into `tokenizer.tokenizer.init_cfg.checkpoint` (for one in the model, below
# `model.target_generator`).
tokenizer = dict(
    type="mapet_mm.FrozenTokenizer",
    image_size=112,
    vocab_size=8192,
    tokenizer=dict(
        type="DALL-E",
        vocab_size=8192,
        init_cfg=dict(
            type="Pretrained",
            checkpoint="https://mmassets.onedl.ai/mmselfsup/1.x/target_generator_ckpt/dalle_encoder.pth",
        ),
    ),
)
# DALL-E maps pixels to 0.1..0.9: (x / 255) * 0.8 + 0.1.
tokenizer_mean = [-31.875, -31.875, -31.875]
tokenizer_std = [318.75, 318.75, 318.75]
tokenizer_square = [
    dict(type="ResizeEdge", scale=112, edge="short", backend="pillow", interpolation="bicubic"),
    dict(type="CenterCrop", crop_size=112),
]
