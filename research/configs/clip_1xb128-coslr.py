# The CLIP whose tower k-CLIP takes, trained on captions of the dataset's training images.
_base_ = [
    "../../configs/micro/_base_/images.py",
    "../../configs/micro/_base_/runtime.py",
    "_base_training.py",
]

image_size = _base_.clip_stride * _base_.grid
resize = dict(type="ResizeEdge", scale=image_size, edge="short", backend="pillow", interpolation="bicubic")
pipeline = [*_base_.load, resize, _base_.pack]
train_dataloader = dict(batch_size=128, dataset=dict(pipeline=pipeline))
val_dataloader = dict(dataset=dict(pipeline=pipeline))
test_dataloader = val_dataloader

# CLIP's own mean and standard deviation, in 0..255.
data_preprocessor = dict(
    type="ClsDataPreprocessor",
    mean=[122.7709383, 116.7460125, 104.09373615],
    std=[68.5005327, 66.6321579, 70.32316305],
    num_classes=_base_.num_classes,
)
model = dict(
    type="mapet_mm.CaptionCLIP",
    vision=_base_.clip_resnet,
    text=dict(layers=2, width=64, heads=2),
    embed_dims=64,
    image_size=image_size,
    class_names=_base_.class_names or [str(label) for label in range(_base_.num_classes)],
    stride=_base_.clip_stride,
)

randomness = dict(seed=_base_.get("tokenizer_seed", 0))
optim_wrapper = dict(optimizer=dict(lr=2e-3))
param_scheduler = [dict(end=_base_.clip_epochs, **_base_.cosine)]
train_cfg = dict(by_epoch=True, max_epochs=_base_.clip_epochs, val_interval=1)
val_cfg = dict()
test_cfg = dict()
val_evaluator = dict(type="Accuracy", topk=(1,))  # zero-shot
test_evaluator = val_evaluator
