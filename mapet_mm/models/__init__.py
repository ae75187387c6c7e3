"""Models: backbones, heads and the MaPeT algorithm."""

from mapet_mm.models.backbones.other_vits import MaPeTPretrainBEiT, MaPeTPretrainEVA02
from mapet_mm.models.backbones.timm_vit import MaPeTPretrainTIMM
from mapet_mm.models.backbones.token_classifiers import OneHotTokens, TokenMLP, TokenViT
from mapet_mm.models.backbones.vit import MaPeTPretrainViT, MaPeTViT
from mapet_mm.models.heads.linear_probe import LayerwiseLinearHead, LinearProbe
from mapet_mm.models.heads.token_prediction_head import BEiTTokenHead, CAETokenHead, TokenPredictionHead
from mapet_mm.models.necks.feature_pyramid import SimpleFeaturePyramid
from mapet_mm.models.necks.necks import BatchNormNeck, ProjectedCAENeck
from mapet_mm.models.selfsup.cae import ProjectedCAE
from mapet_mm.models.selfsup.mapet import MaPeT
from mapet_mm.models.utils.data_preprocessor import TokenGridDataPreprocessor
from mapet_mm.models.utils.objectives import OBJECTIVES, Objective, visibility
from mapet_mm.models.utils.two_view_data_preprocessor import TwoViewDataPreprocessor

__all__ = [
    "OBJECTIVES",
    "BEiTTokenHead",
    "BatchNormNeck",
    "CAETokenHead",
    "LayerwiseLinearHead",
    "LinearProbe",
    "MaPeT",
    "MaPeTPretrainBEiT",
    "MaPeTPretrainEVA02",
    "MaPeTPretrainTIMM",
    "MaPeTPretrainViT",
    "MaPeTViT",
    "Objective",
    "OneHotTokens",
    "ProjectedCAE",
    "ProjectedCAENeck",
    "SimpleFeaturePyramid",
    "TokenGridDataPreprocessor",
    "TokenMLP",
    "TokenPredictionHead",
    "TokenViT",
    "TwoViewDataPreprocessor",
    "visibility",
]
