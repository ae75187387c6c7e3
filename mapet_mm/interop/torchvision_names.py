"""Weights for torchvision's `VisionTransformer` and other plain ViTs, which have no LayerScale."""

import re
from collections.abc import Iterable, Mapping

from torch import Tensor

from mapet_mm.interop.names import rename

OUTER = [
    ("backbone.cls_token", "class_token"),
    ("backbone.pos_embed", "encoder.pos_embedding"),
    ("backbone.patch_embed.projection.", "conv_proj."),
    ("backbone.layers.", "encoder.layers.encoder_layer_"),
    ("backbone.ln1.", "encoder.ln."),
    ("head.fc.", "heads.head."),
]
LAYER = [
    ("ln1.", "ln_1."),
    ("attn.qkv.", "self_attention.in_proj_"),
    ("attn.proj.", "self_attention.out_proj."),
    ("ln2.", "ln_2."),
    ("ffn.layers.0.0.", "mlp.0."),
    ("ffn.layers.1.", "mlp.3."),
]
SCALED = {"attn.gamma1.weight": "attn.proj", "ffn.gamma2.weight": "ffn.layers.1"}


def has_layer_scale(names: Iterable[str]) -> bool:
    """Whether one of these names of this package belongs to a LayerScale."""
    return any(name.endswith(tuple(SCALED)) for name in names)


def fold_layer_scale(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same network without LayerScale: each scale is multiplied into the linear layer before it.

    Args:
        weights: a plain ViT's, under this package's names.
    """
    folded = dict(weights)
    for name in weights:
        if found := re.fullmatch(r"(.*layers\.\d+\.)(attn\.gamma1\.weight|ffn\.gamma2\.weight)", name):
            scale, linear = folded.pop(name), found[1] + SCALED[found[2]]
            folded[f"{linear}.weight"] = folded[f"{linear}.weight"] * scale[:, None]
            folded[f"{linear}.bias"] = folded[f"{linear}.bias"] * scale
    return folded


def torchvision_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """torchvision's names for a plain ViT's weights, with LayerScale folded in.

    Args:
        weights: complete, as returned by `mapet_mm.interop.convert.network`.

    Raises:
        ValueError: no class token or no final norm, which torchvision's network always has, or a weight that
            it does not have.
    """
    for name, what in (("backbone.cls_token", "class token"), ("backbone.ln1.weight", "final norm")):
        if name not in weights:
            raise ValueError(f"the weights have no {what} (`{name}`), which torchvision's ViT has always")
    return rename(fold_layer_scale(weights), OUTER, LAYER, "torchvision's ViT")
