"""Models: backbones, heads and the MaPeT algorithm."""

from mapet_mm.models.cae import ProjectedCAE
from mapet_mm.models.feature_pyramid import SimpleFeaturePyramid
from mapet_mm.models.heads import BEiTTokenHead, CAETokenHead, TokenPredictionHead
from mapet_mm.models.mapet import MaPeT
from mapet_mm.models.necks import BatchNormNeck, ProjectedCAENeck
from mapet_mm.models.objectives import OBJECTIVES, Objective, visibility
from mapet_mm.models.other_vits import MaPeTPretrainBEiT, MaPeTPretrainEVA02
from mapet_mm.models.probe import LayerwiseLinearHead, LinearProbe
from mapet_mm.models.timm_vit import MaPeTPretrainTIMM
from mapet_mm.models.token_classifiers import OneHotTokens, TokenMLP, TokenViT
from mapet_mm.models.vit import MaPeTPretrainViT, MaPeTViT

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
    "TokenMLP",
    "TokenPredictionHead",
    "TokenViT",
    "visibility",
]
