"""A small ViT with random weights, and its geometry."""

import torch

from mapet_mm.models import MaPeTPretrainViT

ARCH = dict(embed_dims=24, num_layers=3, num_heads=3, feedforward_channels=48)
GEOMETRY = dict(arch=ARCH, img_size=20, patch_size=4)  # 5 x 5 patches, N = 26


def pretrain_vit(cutting_point=8, objective="mapet", std=0.3, **kwargs) -> MaPeTPretrainViT:
    vit = MaPeTPretrainViT(cutting_point=cutting_point, objective=objective, **{**GEOMETRY, **kwargs})
    for parameter in vit.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return vit.eval()
