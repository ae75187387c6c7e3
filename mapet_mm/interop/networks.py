"""What timm and Hugging Face are told of a network: this package's ViT, and the ViTs that both of them have.

Hugging Face's are `ViT`, `Dinov2`, `Dinov2WithRegisters` and `DINOv3ViT`; its config, a dict, describes each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from mapet_mm.interop.convert import CLASS_TOKEN, FINAL_NORM, num_classes_of, sizes_of
from mapet_mm.interop.description import Description
from mapet_mm.interop.names import MODEL_TYPES

POOLED_NORM = "backbone.ln2.weight"
# timm's names for widths.
SIZES = {192: "tiny", 384: "small", 768: "base", 1024: "large"}
# Options that timm's networks do not have, and the only value that is taken.
FIXED = {"key_bias": False, "proj_bias": True, "mlp_bias": True, "num_channels": 3}


def timm_config(weights: Mapping[str, Tensor], description: Description) -> dict[str, Any]:
    """The content of config.json for timm's `create_model("local-dir:...")`.

    Raises:
        ValueError: the weights have both a final norm and a norm after pooling, or a classifier of a feature
            that timm's network does not classify.
    """
    has_final_norm = FINAL_NORM in weights
    has_pooled_norm = POOLED_NORM in weights
    if has_final_norm and has_pooled_norm:
        raise ValueError(
            "the weights have a final norm and one after pooling; timm's network has one of them"
        )
    height, width = description.img_size
    sizes = sizes_of(weights)
    num_classes = num_classes_of(weights)
    global_pool = _global_pool(weights, description)
    arguments = dict(
        img_size=height if height == width else (height, width),
        patch_size=description.patch_size,
        embed_dim=sizes["embed_dims"],
        depth=sizes["num_layers"],
        num_heads=description.num_heads,
        mlp_ratio=mlp_ratio(sizes["embed_dims"], sizes["feedforward_channels"]),
        init_values=0.1,
        class_token=CLASS_TOKEN in weights,
        global_pool=global_pool,
        fc_norm=has_pooled_norm,
    )
    if not has_final_norm and not has_pooled_norm:
        arguments["final_norm"] = False
    if description.num_bands != 3:
        arguments["in_chans"] = description.num_bands
    return {
        "architecture": _architecture("vit", sizes["embed_dims"]),
        "num_classes": num_classes,
        "num_features": sizes["embed_dims"],
        "global_pool": global_pool,
        "model_args": arguments,
        "pretrained_cfg": description.in_timm(num_classes),
    }


def _global_pool(weights: Mapping[str, Tensor], description: Description) -> str:
    """timm's name for the feature that the classifier reads; the mean of the patches without a classifier."""
    if not num_classes_of(weights):
        return "avg"
    if description.feature == "avg_featmap":
        return "avg"
    if description.feature == "cls_token":
        return "avg" if POOLED_NORM in weights else "token"
    raise ValueError(
        f"the config classifies {description.feature}, other libraries the last layer's "
        "cls_token or avg_featmap"
    )


def hf_config(weights: Mapping[str, Tensor], description: Description) -> dict[str, Any]:
    """The content of config.json for Hugging Face's `AutoModel.from_pretrained`.

    Raises:
        ValueError: images are not square, or the MLP's width is not a multiple of the tokens' width.
    """
    height, width = description.img_size
    sizes = sizes_of(weights)
    ratio, rest = divmod(sizes["feedforward_channels"], sizes["embed_dims"])
    if rest or height != width:
        raise ValueError(
            "Dinov2Model takes square images and an MLP whose width is a multiple of the tokens'; these are "
            f"{height} x {width} pixels and {sizes['feedforward_channels']} of {sizes['embed_dims']}"
        )
    bands = {} if description.num_bands == 3 else {"num_channels": description.num_bands}
    return {
        **bands,
        "model_type": "dinov2",
        "architectures": ["Dinov2Model"],
        "image_size": height,
        "patch_size": description.patch_size,
        "hidden_size": sizes["embed_dims"],
        "num_hidden_layers": sizes["num_layers"],
        "num_attention_heads": description.num_heads,
        "mlp_ratio": ratio,
        "layer_norm_eps": 1e-6,
        "use_mask_token": "backbone.mask_token" in weights,
    }


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
    if kind == "dinov3_vit":
        if config["query_bias"] != config["value_bias"]:
            raise ValueError("a bias of the queries or of the values alone; timm's network has both or none")
        arguments["qkv_bias"] = config["query_bias"]
        arguments["num_reg_tokens"] = config["num_register_tokens"]
        arguments["rope_temperature"] = config["rope_theta"]
        arguments["mlp_ratio"] = mlp_ratio(width, config["intermediate_size"])
        if config["use_gated_mlp"]:
            arguments.update(swiglu_mlp=True, swiglu_align_to=1)
        return _architecture(kind, width), arguments

    arguments["qkv_bias"] = config["qkv_bias"]
    if kind == "vit":
        arguments["mlp_ratio"] = mlp_ratio(width, config["intermediate_size"])
        return _architecture(kind, width), arguments
    if kind == "dinov2_with_registers":
        arguments["reg_tokens"] = config["num_register_tokens"]
    arguments["mlp_ratio"] = mlp_ratio(width, int(width * config["mlp_ratio"]))
    if config["use_swiglu_ffn"]:
        arguments["mlp_ratio"] = mlp_ratio(width, 2 * swiglu_width(width, config["mlp_ratio"]))
        # timm's only size with this MLP.
        return MODEL_TYPES[kind].architecture.format("giant"), arguments
    return _architecture(kind, width), arguments


def _architecture(kind: str, width: int) -> str:
    """timm's name for this width; "base" where there is none, for arguments say every size."""
    from timm import is_model

    pattern = MODEL_TYPES[kind].architecture
    name = pattern.format(SIZES.get(width, "base"))
    return name if is_model(name) else pattern.format("base")


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
        architectures=[MODEL_TYPES[kind].model],
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


def mlp_ratio(width: int, inner_width: int) -> float:
    """The ratio that gives `inner_width` although timm truncates its product with the width."""
    ratio = inner_width / width
    if int(width * ratio) == inner_width:
        return ratio
    return (inner_width + 0.5) / width
