"""The pre-training."""

from mmengine.config import read_base
from mmengine.optim import CosineAnnealingLR, LinearLR
from mmpretrain.datasets import ColorJitter, PackInputs
from torch.optim import AdamW

from mapet_mm.datasets import LoadTokenGrid
from mapet_mm.engine import (
    AutocastOptimWrapper,
    KNNProbeHook,
    LayerDecayOptimWrapperConstructor,
    TokenStoreCheckHook,
)
from mapet_mm.evaluation.metrics import TokenAccuracy
from mapet_mm.models import MaPeT, MaPeTPretrainViT, TokenGridDataPreprocessor, TokenPredictionHead
from mapet_mm.tokenizers import PrecomputedTokens

with read_base():
    from .images import *
    from .runtime import *

model = dict(
    type=MaPeT,
    backbone=dict(
        type=MaPeTPretrainViT, arch=arch, img_size=64, patch_size=16, objective="mapet", cutting_point=5
    ),
    head=dict(type=TokenPredictionHead, embed_dims=32, vocab_size=8),
    target_generator=dict(type=PrecomputedTokens, vocab_size=8),
)
data_preprocessor = dict(type=TokenGridDataPreprocessor, mean=mean, std=std, to_rgb=True)

load_tokens = dict(type=LoadTokenGrid, store="tokens")
jitter = dict(type=ColorJitter, brightness=0.4, contrast=0.4, saturation=0.4)
pack = dict(type=PackInputs, algorithm_keys=["token_grid"])
train_dataloader = dict(
    dataset=dict(pipeline=[*load, jitter, load_tokens, pack], **train_images), **train_loader
)
val_dataloader = dict(dataset=dict(pipeline=[*load, load_tokens, pack], **val_images), **val_loader)
val_evaluator = dict(type=TokenAccuracy)
test_dataloader, test_evaluator = val_dataloader, val_evaluator

optim_wrapper = dict(
    type=AutocastOptimWrapper,
    constructor=LayerDecayOptimWrapperConstructor,
    optimizer=dict(type=AdamW, lr=1e-3, weight_decay=0.05),
)
param_scheduler = [
    dict(type=LinearLR, start_factor=1e-3, end=1, by_epoch=True, convert_to_iter_based=True),
    dict(type=CosineAnnealingLR, begin=1, end=2, by_epoch=True, convert_to_iter_based=True),
]

knn_pipeline = [*load, dict(type=PackInputs)]
knn_loader = dict(batch_size=4, num_workers=0)
knn_probe = dict(
    type=KNNProbeHook,
    train_dataloader=dict(dataset=dict(pipeline=knn_pipeline, **train_images), **knn_loader),
    val_dataloader=dict(dataset=dict(pipeline=knn_pipeline, **val_images), **knn_loader),
    k=3,
    interval=1,
)
custom_hooks = [dict(type=TokenStoreCheckHook, codebook="codebook.safetensors"), knn_probe]
