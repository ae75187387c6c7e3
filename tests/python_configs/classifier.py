"""The fine-tuning."""

from mmengine.config import read_base
from mmengine.model import PretrainedInit
from mmengine.optim import CosineAnnealingLR, OptimWrapper
from mmpretrain.datasets import PackInputs
from mmpretrain.evaluation import Accuracy
from mmpretrain.models import ClsDataPreprocessor, CrossEntropyLoss, ImageClassifier, LinearClsHead
from torch.optim import AdamW

from mapet_mm.engine import LayerDecayOptimWrapperConstructor
from mapet_mm.models import MaPeTViT

with read_base():
    from .images import *
    from .runtime import *

model = dict(
    type=ImageClassifier,
    backbone=dict(
        type=MaPeTViT,
        arch=arch,
        img_size=64,
        patch_size=16,
        init_cfg=dict(type=PretrainedInit, checkpoint="", prefix="backbone."),
    ),
    head=dict(type=LinearClsHead, num_classes=3, in_channels=32, loss=dict(type=CrossEntropyLoss)),
)
data_preprocessor = dict(type=ClsDataPreprocessor, num_classes=3, mean=mean, std=std, to_rgb=True)

pipeline = [*load, dict(type=PackInputs)]
train_dataloader = dict(dataset=dict(pipeline=pipeline, **train_images), **train_loader)
val_dataloader = dict(dataset=dict(pipeline=pipeline, **val_images), **val_loader)
test_dataloader = val_dataloader
val_evaluator = test_evaluator = dict(type=Accuracy, topk=(1,))

optim_wrapper = dict(
    type=OptimWrapper,
    constructor=LayerDecayOptimWrapperConstructor,
    optimizer=dict(type=AdamW, lr=1e-3, weight_decay=0.05),
    paramwise_cfg=dict(layer_decay_rate=0.75),
)
param_scheduler = [dict(type=CosineAnnealingLR, end=2, by_epoch=True, convert_to_iter_based=True)]
