# ImageNet-1k with k-CLIP in the model: the ViT's view is jittered, the tokenizer's is not. A recipe takes the
# tokenizer by `model = dict(target_generator=dict(_delete_=True, **_base_.tokenizer))`.
_base_ = ["imagenet_tokens.py", "../tokenizers/kclip_rn50x64_k8192.py"]

data_preprocessor = dict(
    type="mapet_mm.TwoViewDataPreprocessor",
    second_mean=_base_.tokenizer_mean,
    second_std=_base_.tokenizer_std,
)

load, square = _base_.load_square
jittered = [square, _base_.color_jitter]
train_views = dict(type="MultiView", num_views=[1, 1], transforms=[jittered, _base_.tokenizer_square])
test_views = dict(type="MultiView", num_views=[1, 1], transforms=[[square], _base_.tokenizer_square])

train_dataloader = dict(dataset=dict(pipeline=[load, train_views, _base_.pack]))
val_dataloader = dict(dataset=dict(pipeline=[load, test_views, _base_.pack]))
test_dataloader = val_dataloader
