"""A small ViT with random weights, and its geometry."""

from torch import nn

from mapet_mm.models import MaPeTPretrainViT

ARCH = dict(embed_dims=24, num_layers=3, num_heads=3, feedforward_channels=48)
GEOMETRY = dict(arch=ARCH, img_size=20, patch_size=4)  # 5 x 5 patches, N = 26


def randomise(module: nn.Module, std: float = 0.3) -> nn.Module:
    """Draw every parameter anew, biases and norms too, so that none can be exchanged unnoticed."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    module.eval()  # MMPretrain's pre-training backbones return nothing here
    return module


def pretrain_vit(cutting_point=8, objective="mapet", **kwargs) -> MaPeTPretrainViT:
    vit = MaPeTPretrainViT(cutting_point=cutting_point, objective=objective, **{**GEOMETRY, **kwargs})
    return randomise(vit)
