# The dataset's VQ-KD, MMPretrain's, with the patches of the ViT.
_base_ = "_base_/tokenizer.py"

token_store = _base_.token_stores.vqkd

trained = dict(config=_base_.vqkd_training, checkpoint=_base_.vqkd_checkpoint)
trained_by = trained if _base_.vqkd_training else None
pretrained = dict(type="Pretrained", checkpoint=_base_.vqkd_checkpoint, prefix="tokenizer.")
weights = dict(init_cfg=pretrained) if _base_.vqkd_training else dict()

tokenizer = dict(
    type="mapet_mm.FrozenTokenizer",
    image_size=_base_.img_size,
    vocab_size=_base_.vocab_size,
    random_seed=0,  # unless there is an `init_cfg`
    tokenizer=dict(
        encoder_config=dict(
            arch=_base_.vqkd_encoder,
            img_size=_base_.img_size,
            patch_size=_base_.patch_size,
            final_norm=True,
            out_type="featmap",
            use_abs_pos_emb=True,
            use_rel_pos_bias=False,
            layer_scale_init_value=0.0,
        ),
        num_embed=_base_.vocab_size,
        **weights,
        **_base_.vqkd,
    ),
)
data_preprocessor = dict(
    type="SelfSupDataPreprocessor", mean=[127.5, 127.5, 127.5], std=[127.5, 127.5, 127.5], to_rgb=True
)

resize = dict(
    type="ResizeEdge", scale=_base_.img_size, edge="short", backend="pillow", interpolation="bicubic"
)
pipeline = [*_base_.load, resize, _base_.pack]
dataset = [
    dict(pipeline=pipeline, **_base_.train_images),
    dict(pipeline=pipeline, **_base_.val_images),
]

# What to run after the extraction.
next_config = "configs/micro/token-mlp_vqkd_1xb64-coslr.py"
