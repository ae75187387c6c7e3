# DALL-E's tokenizer on the same squares as k-CLIP, for the tokenizer study.
_base_ = ["../_base_/tokenizers/dalle_k8192.py", "../_base_/datasets/imagenet_images.py"]

token_store = "data/imagenet/tokens/dalle_8192"
data_preprocessor = dict(
    type="SelfSupDataPreprocessor", mean=_base_.tokenizer_mean, std=_base_.tokenizer_std, to_rgb=True
)

pipeline = [_base_.load, *_base_.tokenizer_square, _base_.pack]
dataset = [
    dict(pipeline=pipeline, **_base_.train_images),
    dict(pipeline=pipeline, **_base_.val_images),
]

# What to run after the extraction.
next_config = "configs/tokens/token-mlp_dalle_8xb128-coslr-100e_in1k.py"
