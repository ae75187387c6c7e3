"""The tokenizer."""

from mmengine.config import read_base
from mmpretrain.datasets import PackInputs
from mmpretrain.models import SelfSupDataPreprocessor

from mapet_mm.tokenizers import KCLIP

with read_base():
    from .images import *

tokenizer = dict(
    type=KCLIP,
    clip_model=dict(image_size=64, layers=[1, 1, 1, 1], width=8),
    pretrained=dict(type="random", seed=0),
    codebook="codebook.safetensors",
    stride=16,
)
token_store = "tokens"
data_preprocessor = dict(
    type=SelfSupDataPreprocessor, mean=[122.8, 116.7, 104.1], std=[68.5, 66.6, 70.3], to_rgb=True
)
pipeline = [*load, dict(type=PackInputs)]
dataset = [dict(pipeline=pipeline, **train_images), dict(pipeline=pipeline, **val_images)]
codebook = dict(dataset=dataset[0], positions_per_image=16, k=8, niter=3, nredo=1, seed=0)
