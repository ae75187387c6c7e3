"""The same ViT in Hugging Face and timm: `ViT`, `Dinov2`, `Dinov2WithRegisters` and `DINOv3ViT`.

A network is described by Hugging Face's config, as a dict. The conversions change names and cut or join
matrices, not values, but for one sum: with registers, timm adds no position to the class token, so
Hugging Face's is added to the token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mapet_mm.interop.names import Naming, StateDict
from mapet_mm.interop.timm_export import mlp_ratio

MODEL_TYPES = {
    "vit": "ViTModel",
    "dinov2": "Dinov2Model",
    "dinov2_with_registers": "Dinov2WithRegistersModel",
    "dinov3_vit": "DINOv3ViTModel",
}
# timm's network of each model type and width; the arguments say every size, so the fallback is only a name.
ARCHITECTURES = {
    "vit": ("vit_{}_patch16_224", {192: "tiny", 384: "small", 768: "base", 1024: "large"}),
    "dinov2": ("vit_{}_patch14_dinov2", {384: "small", 768: "base", 1024: "large"}),
    "dinov2_with_registers": ("vit_{}_patch14_reg4_dinov2", {384: "small", 768: "base", 1024: "large"}),
    "dinov3_vit": ("vit_{}_patch16_dinov3", {384: "small", 768: "base", 1024: "large"}),
}
# What timm's network adds to the variance in its norms.
EPS = {"vit": 1e-6, "dinov2": 1e-6, "dinov2_with_registers": 1e-6, "dinov3_vit": 1e-5}
# Options that timm's networks do not have, and the only value that is taken.
FIXED = {"key_bias": False, "proj_bias": True, "mlp_bias": True, "num_channels": 3}
NOT_TIMM = ("embeddings.mask_token", "pooler.")

_OUTER = [
    ("cls_token", "embeddings.cls_token"),
    ("pos_embed", "embeddings.position_embeddings"),
    ("reg_token", "embeddings.register_tokens"),
    ("patch_embed.proj.", "embeddings.patch_embeddings.projection."),
    ("blocks.", "encoder.layer."),
    ("norm.", "layernorm."),
]
_ATTENTION = [("attn.qkv.", "attention.attention.qkv."), ("attn.proj.", "attention.output.dense.")]
_PARTS = (("query", 1), ("key", 1), ("value", 1))
_DINOV2_LAYER = [
    ("norm1.", "norm1."),
    ("norm2.", "norm2."),
    *_ATTENTION,
    ("ls1.gamma", "layer_scale1.lambda1"),
    ("ls2.gamma", "layer_scale2.lambda1"),
]
_VIT_LAYER = [
    ("norm1.", "layernorm_before."),
    ("norm2.", "layernorm_after."),
    *_ATTENTION,
    ("mlp.fc1.", "intermediate.dense."),
    ("mlp.fc2.", "output.dense."),
]
_DINOV3_OUTER = [
    ("cls_token", "embeddings.cls_token"),
    ("reg_token", "embeddings.register_tokens"),
    ("patch_embed.proj.", "embeddings.patch_embeddings."),
    ("blocks.", "layer."),
    ("norm.", "norm."),
]
_DINOV3_LAYER = [
    ("norm1.", "norm1."),
    ("norm2.", "norm2."),
    ("attn.qkv.", "attention.qkv."),
    ("attn.q_bias", "attention.q_bias"),
    ("attn.v_bias", "attention.v_bias"),
    ("attn.proj.", "attention.o_proj."),
    ("gamma_1", "layer_scale1.lambda1"),
    ("gamma_2", "layer_scale2.lambda1"),
    ("mlp.fc2.", "mlp.down_proj."),
]
_MLP = [("mlp.fc1.", "mlp.fc1."), ("mlp.fc2.", "mlp.fc2.")]
_PACKED_MLP = [("mlp.fc1.", "mlp.weights_in."), ("mlp.fc2.", "mlp.weights_out.")]
_DINOV3_MLP = [("mlp.fc1.", "mlp.up_proj.")]
_DINOV3_GATED_MLP = [("mlp.fc1_g.", "mlp.gate_proj."), ("mlp.fc1_x.", "mlp.up_proj.")]


def naming_of(config: Mapping[str, Any]) -> Naming:
    """The names of timm's network (in place of this package's) and of Hugging Face's files."""
    kind = config["model_type"]
    network = f"Hugging Face's {MODEL_TYPES[kind]}"
    if kind == "dinov3_vit":
        mlp = _DINOV3_GATED_MLP if config.get("use_gated_mlp") else _DINOV3_MLP
        parts = (("q_proj", 1), ("k_proj", 1), ("v_proj", 1))
        return Naming(network, _DINOV3_OUTER, [*_DINOV3_LAYER, *mlp], "attention.", parts)
    layer = _VIT_LAYER
    if kind != "vit":
        layer = [*_DINOV2_LAYER, *(_PACKED_MLP if config.get("use_swiglu_ffn") else _MLP)]
    return Naming(network, _OUTER, layer, "attention.attention.", _PARTS)


def hf_to_timm(weights: StateDict, config: Mapping[str, Any]) -> StateDict:
    """timm's names for the weights in a file of Hugging Face; mask token and pooler are left out.

    Raises:
        ValueError: a name is unknown, or a part of the attention is missing.
    """
    kept = {name: value for name, value in weights.items() if not name.startswith(NOT_TIMM)}
    for part in ("q", "v"):  # DINOv3 has no bias of the keys, so timm keeps the two others apart
        kept = {name.replace(f"{part}_proj.bias", f"{part}_bias"): value for name, value in kept.items()}
    renamed = naming_of(config).to_mm(kept)
    if config["model_type"] == "dinov2_with_registers":
        of_class, of_patches = renamed["pos_embed"].tensor_split([1], dim=1)
        renamed["cls_token"] = renamed["cls_token"] + of_class
        renamed["pos_embed"] = of_patches
    return renamed


def timm_to_hf(weights: StateDict, config: Mapping[str, Any]) -> StateDict:
    """Names of Hugging Face's files for the weights of timm's network, the inverse of `hf_to_timm`.

    Raises:
        ValueError: Hugging Face's network has nothing of one of the names.
    """
    kept = dict(weights)
    if config["model_type"] == "dinov2_with_registers":  # the class token has its position in it
        kept["pos_embed"] = torch.cat([torch.zeros_like(kept["cls_token"]), kept["pos_embed"]], dim=1)
    renamed = naming_of(config).from_mm(kept)
    for part in ("q", "v"):
        renamed = {name.replace(f".{part}_bias", f".{part}_proj.bias"): v for name, v in renamed.items()}
    return renamed


def timm_network(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """timm's architecture of a network of Hugging Face, and the arguments of `timm.create_model`.

    Raises:
        ValueError: a network that timm does not have.
    """
    kind = config["model_type"]
    if kind not in MODEL_TYPES:
        raise ValueError(f"a model of type {kind}; known are {', '.join(MODEL_TYPES)}")
    activation = "silu" if config.get("use_gated_mlp") else "gelu"
    for name, value in {**FIXED, "hidden_act": activation}.items():
        if config.get(name, value) != value:
            raise ValueError(f"{name}={config[name]}, timm's network has {value}")
    width = config["hidden_size"]
    arguments = dict(
        img_size=config["image_size"],
        patch_size=config["patch_size"],
        embed_dim=width,
        depth=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
    )
    pattern, sizes = ARCHITECTURES[kind]
    size = sizes.get(width, "base")
    if kind == "dinov3_vit":
        if config["query_bias"] != config["value_bias"]:
            raise ValueError("a bias of the queries or of the values alone; timm's network has both or none")
        arguments["qkv_bias"] = config["query_bias"]
        arguments["num_reg_tokens"] = config["num_register_tokens"]
        arguments["rope_temperature"] = config["rope_theta"]
        arguments["mlp_ratio"] = mlp_ratio(width, config["intermediate_size"])
        if config["use_gated_mlp"]:
            arguments.update(swiglu_mlp=True, swiglu_align_to=1)
        return pattern.format(size), arguments

    arguments["qkv_bias"] = config["qkv_bias"]
    if kind == "vit":
        arguments["mlp_ratio"] = mlp_ratio(width, config["intermediate_size"])
        return pattern.format(size), arguments
    if kind == "dinov2_with_registers":
        arguments["reg_tokens"] = config["num_register_tokens"]
    arguments["mlp_ratio"] = mlp_ratio(width, int(width * config["mlp_ratio"]))
    if config["use_swiglu_ffn"]:
        size = "giant"  # timm's only one with this MLP
        arguments["mlp_ratio"] = mlp_ratio(width, 2 * swiglu_width(width, config["mlp_ratio"]))
    return pattern.format(size), arguments


def swiglu_width(width: int, ratio: float) -> int:
    """Inner width of Dinov2's SwiGLU: two thirds of the MLP's, rounded up to a multiple of 8."""
    return (int(int(width * ratio) * 2 / 3) + 7) // 8 * 8


def hf_network(vit: nn.Module, side: int) -> dict[str, Any] | None:
    """Hugging Face's config of the network that a timm ViT is; None if it has none.

    Args:
        vit: of timm, without a classifier.
        side: of its images, in pixels.
    """
    kind = _model_type(vit)
    if kind is None:
        return None
    first = vit.blocks[0]
    config = dict(
        model_type=kind,
        architectures=[MODEL_TYPES[kind]],
        image_size=side,
        patch_size=vit.patch_embed.patch_size[0],
        hidden_size=vit.embed_dim,
        num_hidden_layers=len(vit.blocks),
        num_attention_heads=first.attn.num_heads,
        layer_norm_eps=first.norm1.eps,
    )
    if kind == "dinov3_vit":
        is_gated = hasattr(first.mlp, "fc1_g")
        has_bias = first.attn.q_bias is not None
        config.update(
            num_register_tokens=vit.num_prefix_tokens - 1,
            intermediate_size=first.mlp.fc2.in_features,
            use_gated_mlp=is_gated,
            hidden_act="silu" if is_gated else "gelu",
            query_bias=has_bias,
            value_bias=has_bias,
            rope_theta=float(vit.rope.temperature),
        )
        return config
    config["qkv_bias"] = first.attn.qkv.bias is not None
    inner_width = first.mlp.fc2.in_features
    if kind == "vit":
        config["intermediate_size"] = inner_width
        return config
    if kind == "dinov2_with_registers":
        config["num_register_tokens"] = vit.num_prefix_tokens - 1
    is_packed = first.mlp.fc1.out_features == 2 * inner_width
    ratio, rest = divmod(inner_width * (3 if is_packed else 1), vit.embed_dim * (2 if is_packed else 1))
    config.update(mlp_ratio=ratio, use_swiglu_ffn=is_packed)
    if is_packed:
        return config if swiglu_width(vit.embed_dim, ratio) == inner_width else None
    return None if rest else config


def _model_type(vit: nn.Module) -> str | None:
    """The model type of Hugging Face that computes the same as a timm ViT; None without one."""
    first = vit.blocks[0]
    attention = first.attn
    norms = (vit.norm_pre, vit.fc_norm, attention.q_norm, attention.k_norm, attention.norm)
    has_more_norms = any(not isinstance(norm, nn.Identity) for norm in (*norms, first.mlp.norm))
    if has_more_norms or not isinstance(vit.norm, nn.LayerNorm):
        return None
    if type(vit).__name__ == "Eva":
        is_dinov3 = type(vit.rope).__name__ == "RotaryEmbeddingDinoV3" and vit.pos_embed is None
        has_names = attention.qkv is not None and first.gamma_1 is not None and first.gamma_2 is not None
        has_mlp = hasattr(first.mlp, "fc1_g") or _is_gelu(first.mlp.act)
        return "dinov3_vit" if is_dinov3 and has_names and has_mlp and attention.rotate_half else None

    has_scale = not isinstance(first.ls1, nn.Identity)
    is_packed = type(first.mlp).__name__ == "GluMlp" and not first.mlp.gate_last
    is_plain = type(first.mlp).__name__ == "Mlp" and _is_gelu(first.mlp.act)
    if not is_plain and not (is_packed and has_scale and isinstance(first.mlp.act, nn.SiLU)):
        return None
    if vit.reg_token is not None:
        return "dinov2_with_registers" if has_scale and vit.no_embed_class else None
    if vit.no_embed_class:
        return None
    return "dinov2" if has_scale else "vit"


def _is_gelu(activation: nn.Module) -> bool:
    """True for the exact GELU, of PyTorch or timm."""
    return type(activation).__name__ == "GELU" and getattr(activation, "approximate", "none") == "none"
