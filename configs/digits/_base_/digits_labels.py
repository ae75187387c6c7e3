# Digits with their labels: slight crops in training, the whole image in evaluation.
_base_ = "digits.py"

data_preprocessor = dict(num_classes=10)

crop = dict(type="RandomResizedCrop", scale=24, crop_ratio_range=(0.7, 1.0), interpolation="bicubic")

train_dataloader = dict(dataset=dict(pipeline=[_base_.load, crop, _base_.pack]))
val_dataloader = dict(dataset=dict(pipeline=[_base_.load, _base_.pack]))
test_dataloader = val_dataloader
val_evaluator = dict(type="Accuracy", topk=(1,))
test_evaluator = val_evaluator
