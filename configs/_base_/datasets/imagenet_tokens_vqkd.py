# ImageNet-1k with VQ-KD tokens, as written by configs/tokenizers.
_base_ = "imagenet_tokens.py"

load_tokens = dict(type="mapet_mm.LoadTokenGrid", store="data/imagenet/tokens/vqkd_8192")
train_pipeline = [*_base_.load_square, _base_.color_jitter, load_tokens, _base_.pack]
test_pipeline = [*_base_.load_square, load_tokens, _base_.pack]

train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
# Images from an inferencer have no path and need no tokens (`mmpretrain.FeatureExtractor`).
load_known_tokens = dict(load_tokens, optional=True)
test_dataloader = dict(dataset=dict(pipeline=[*_base_.load_square, load_known_tokens, _base_.pack]))
