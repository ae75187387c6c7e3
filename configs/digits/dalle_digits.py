# MMPretrain's DALL-E encoder for the embedded digits: a small one with fixed random weights.
_base_ = "_base_/digits_images.py"

token_store = "work_dirs/digits/tokens_dalle"

tokenizer = dict(
    type="mapet_mm.FrozenTokenizer",
    image_size=48,
    vocab_size=128,
    random_seed=0,
    tokenizer=dict(type="DALL-E", n_hid=32, n_blk_per_group=1, vocab_size=128),
)
data_preprocessor = dict(
    type="SelfSupDataPreprocessor", mean=[127.5, 127.5, 127.5], std=[127.5, 127.5, 127.5], to_rgb=True
)

resize = dict(type="ResizeEdge", scale=48, edge="short", backend="pillow", interpolation="bicubic")
pipeline = [_base_.load, resize, _base_.pack]
dataset = [
    dict(pipeline=pipeline, **_base_.train_images),
    dict(pipeline=pipeline, **_base_.val_images),
]

# What to run after the extraction.
next_config = "configs/digits/token-mlp_dalle_1xb64-coslr-20e_digits.py"
