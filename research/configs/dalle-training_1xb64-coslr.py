# The dataset's DALL-E encoder, trained as a discrete autoencoder of its images.
_base_ = [
    "../../configs/micro/_base_/images.py",
    "../../configs/micro/_base_/runtime.py",
    "_base_training.py",
]

resize = dict(
    type="ResizeEdge", scale=8 * _base_.grid, edge="short", backend="pillow", interpolation="bicubic"
)
train_dataloader = dict(dataset=dict(pipeline=[*_base_.load, resize, _base_.pack]))
val_dataloader = val_evaluator = val_cfg = None
test_dataloader = test_evaluator = test_cfg = None

data_preprocessor = dict(
    type="SelfSupDataPreprocessor", mean=[127.5, 127.5, 127.5], std=[127.5, 127.5, 127.5]
)
model = dict(
    type="mapet_mm.DiscreteAutoencoder",
    tokenizer=dict(vocab_size=_base_.vocab_size, **_base_.dalle),
)

param_scheduler = [dict(end=_base_.dalle_epochs, **_base_.cosine)]
train_cfg = dict(by_epoch=True, max_epochs=_base_.dalle_epochs)
