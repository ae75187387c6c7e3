# Images with their labels: slight crops in training, the whole image in evaluation.
_base_ = "images.py"

data_preprocessor = dict(num_classes=_base_.num_classes)

crop = dict(
    type="RandomResizedCrop", scale=_base_.img_size, crop_ratio_range=(0.7, 1.0), interpolation="bicubic"
)

train_dataloader = dict(dataset=dict(pipeline=[*_base_.load, crop, _base_.pack]))
val_dataloader = dict(dataset=dict(pipeline=[*_base_.load, _base_.pack]))
test_dataloader = val_dataloader
val_evaluator = dict(type="Accuracy", topk=(1,))
test_evaluator = val_evaluator
