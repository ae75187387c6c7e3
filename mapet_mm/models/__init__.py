"""Models: backbones, heads, necks, algorithms and target generators."""

from mapet_mm.models.backbones.timm_vit import TIMMViT
from mapet_mm.models.backbones.token_classifiers import OneHotTokens, TokenMLP, TokenViT
from mapet_mm.models.backbones.two_stream_timm import MaPeTPretrainTIMM
from mapet_mm.models.backbones.vit import MaPeTPretrainViT, MaPeTViT
from mapet_mm.models.data_preprocessors.data_preprocessor import (
    ClsDataPreprocessor,
    SelfSupDataPreprocessor,
    TokenGridDataPreprocessor,
    TwoViewDataPreprocessor,
)
from mapet_mm.models.heads.linear_probe import LayerwiseLinearHead, LinearProbe
from mapet_mm.models.heads.token_prediction_head import BEiTTokenHead, CAETokenHead, TokenPredictionHead
from mapet_mm.models.necks.necks import BatchNormNeck, ProjectedCAENeck, SimpleFeaturePyramid
from mapet_mm.models.selfsup.cae import ProjectedCAE
from mapet_mm.models.selfsup.mapet import MaPeT
from mapet_mm.models.selfsup.visible_mim import CrossAttentionPredictor, VisibleMIM
from mapet_mm.models.target_generators.frozen_tokenizer import FrozenTokenizer
from mapet_mm.models.target_generators.grid_kmeans import GridKMeans
from mapet_mm.models.target_generators.kclip import KCLIP
from mapet_mm.models.target_generators.precomputed_tokens import PrecomputedTokens
from mapet_mm.models.utils.objectives import OBJECTIVES, Objective, visibility
