# ImageNet-1k without tokens: random crops, which are flipped; no colour jitter.
_base_ = "imagenet_tokens.py"

data_preprocessor = dict(type="mapet_mm.SelfSupDataPreprocessor")

crop = [
    dict(
        type="RandomResizedCrop",
        scale=224,
        crop_ratio_range=(0.2, 1.0),
        backend="pillow",
        interpolation="bicubic",
    ),
    dict(type="RandomFlip", prob=0.5),
    dict(type="PackInputs"),
]
train_dataloader = dict(dataset=dict(pipeline=[_base_.load_square[0], *crop]))

# MMPretrain's MAE has no validation.
val_dataloader = val_evaluator = val_cfg = None
test_dataloader = test_evaluator = test_cfg = None

custom_hooks = [_base_.knn_probe]
