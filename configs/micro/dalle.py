# The dataset's DALL-E encoder, MMPretrain's, whose stride is 8: one token per patch of the ViT.
_base_ = "_base_/tokenizer.py"

token_store = _base_.token_stores.dalle
image_size = 8 * _base_.grid

trained = dict(config=_base_.dalle_training, checkpoint=_base_.dalle_checkpoint)
trained_by = trained if _base_.dalle_training else None
pretrained = dict(type="Pretrained", checkpoint=_base_.dalle_checkpoint, prefix="tokenizer.")
weights = dict(init_cfg=pretrained) if _base_.dalle_training else dict()

tokenizer = dict(
    type="mapet_mm.FrozenTokenizer",
    image_size=image_size,
    vocab_size=_base_.vocab_size,
    random_seed=0,  # unless there is an `init_cfg`
    tokenizer=dict(vocab_size=_base_.vocab_size, **weights, **_base_.dalle),
)
data_preprocessor = dict(
    type="SelfSupDataPreprocessor", mean=[127.5, 127.5, 127.5], std=[127.5, 127.5, 127.5], to_rgb=True
)

resize = dict(type="ResizeEdge", scale=image_size, edge="short", backend="pillow", interpolation="bicubic")
pipeline = [*_base_.load, resize, _base_.pack]
dataset = [
    dict(pipeline=pipeline, **_base_.train_images),
    dict(pipeline=pipeline, **_base_.val_images),
]

# What to run after the extraction.
next_config = "configs/micro/token-mlp_dalle_1xb64-coslr.py"
