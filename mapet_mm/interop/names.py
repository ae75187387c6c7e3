"""Names of a ViT's weights here, in the authors' networks, timm, Hugging Face and torchvision."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mapet_mm.models.backbones.checkpoint_hooks import OF_TIMM

StateDict = dict[str, Tensor]
# Beginnings of names, as (this package's, the other's): the first that fits is replaced, the rest is kept.
# `*` stands for the number of a layer.
Names = list[tuple[str, str]]

# Where this package's backbone has the weights of a network of timm's that it continues.
TIMM_NETWORK = f"backbone.{OF_TIMM}"
# Weights that only pre-training has; timm has neither of them, Hugging Face has no head.
MASK_TOKEN, TOKEN_HEAD = "backbone.mask_token", "head.projection."
LAYER_NUMBER = re.compile(r"(?<=[._])\d+(?=\.)")


@dataclass(frozen=True)
class Naming:
    """Names in another library's plain ViT."""

    network: str  # for messages
    names: Names
    qkv: str = ""  # the name of queries, keys and values together, if their library stores them apart
    parts: tuple[tuple[str, int], ...] = ()  # the names of these, and how many of the three each holds
    kinds: tuple[str, ...] = ("weight", "bias")  # that are apart there and together here

    def from_mm(self, weights: Mapping[str, Tensor]) -> StateDict:
        """Their names for weights of this package; ValueError where they have none."""
        renamed = _rename(weights, self.names, self.network)
        if not self.parts:
            return renamed
        cut = {}
        for name, value in renamed.items():
            before, is_joint, kind = name.partition(f".{self.qkv}.")
            if not is_joint:
                cut[name] = value
                continue
            third = len(value) // 3
            pieces = value.split([third * share for _, share in self.parts])
            for (part, _), piece in zip(self.parts, pieces, strict=True):
                cut[f"{before}.{part}.{kind}"] = piece.contiguous()
        return cut

    def to_mm(self, weights: Mapping[str, Tensor]) -> StateDict:
        """Names of this package for their weights; ValueError for unknown names and incomplete attention."""
        joined = dict(weights)
        for name in weights if self.parts else ():
            before, is_first, kind = name.partition(f".{self.parts[0][0]}.")
            if not is_first or kind not in self.kinds:
                continue
            parts = [f"{before}.{part}.{kind}" for part, _ in self.parts]
            for part in parts:
                if part not in weights:
                    raise ValueError(f"`{part}` is missing: it belongs to `{name}`")
            joined[f"{before}.{self.qkv}.{kind}"] = torch.cat([joined.pop(part) for part in parts])
        return _rename(joined, [(theirs, ours) for ours, theirs in self.names], "MaPeTViT")


def _rename(weights: Mapping[str, Tensor], names: Names, network: str) -> StateDict:
    """The weights under other names."""
    return {_renamed(name, names, network): value for name, value in weights.items()}


def _renamed(name: str, names: Names, network: str) -> str:
    """The other name; ValueError if there is none."""
    number = LAYER_NUMBER.search(name)
    pattern = LAYER_NUMBER.sub("*", name, count=1)
    for old, new in names:
        if pattern.startswith(old):
            renamed = new + pattern.removeprefix(old)
            return renamed.replace("*", number[0]) if number else renamed
    raise ValueError(f"`{name}`: {network} has nothing of this name")


def _inside(ours: str, theirs: str, names: Names) -> Names:
    """Names of the parts of a layer, with the names of the layers before them."""
    return [(ours + own, theirs + other) for own, other in names]


TIMM = Naming(
    "timm's VisionTransformer",
    [
        ("backbone.cls_token", "cls_token"),
        ("backbone.pos_embed", "pos_embed"),
        ("backbone.patch_embed.projection.", "patch_embed.proj."),
        ("backbone.layers.*.ln1.", "blocks.*.norm1."),
        ("backbone.layers.*.ln2.", "blocks.*.norm2."),
        ("backbone.layers.*.attn.qkv.", "blocks.*.attn.qkv."),
        ("backbone.layers.*.attn.proj.", "blocks.*.attn.proj."),
        ("backbone.layers.*.attn.gamma1.weight", "blocks.*.ls1.gamma"),
        ("backbone.layers.*.ffn.layers.0.0.", "blocks.*.mlp.fc1."),
        ("backbone.layers.*.ffn.layers.1.", "blocks.*.mlp.fc2."),
        ("backbone.layers.*.ffn.gamma2.weight", "blocks.*.ls2.gamma"),
        ("backbone.ln1.", "norm."),
        ("backbone.ln2.", "fc_norm."),
        ("head.fc.", "head."),
    ],
)
REFERENCE = Naming(
    "the authors' network",
    [*TIMM.names, (MASK_TOKEN, "mask_positional_token"), (TOKEN_HEAD, "decoder.")],
    qkv="attn.qkv",
    parts=(("attn.q", 1), ("attn.kv", 2)),
)
TORCHVISION = Naming(
    "torchvision's VisionTransformer",
    [
        ("backbone.cls_token", "class_token"),
        ("backbone.pos_embed", "encoder.pos_embedding"),
        ("backbone.patch_embed.projection.", "conv_proj."),
        *_inside(
            "backbone.layers.*.",
            "encoder.layers.encoder_layer_*.",
            [
                ("ln1.", "ln_1."),
                ("attn.qkv.", "self_attention.in_proj_"),
                ("attn.proj.", "self_attention.out_proj."),
                ("ln2.", "ln_2."),
                ("ffn.layers.0.0.", "mlp.0."),
                ("ffn.layers.1.", "mlp.3."),
            ],
        ),
        ("backbone.ln1.", "encoder.ln."),
        ("head.fc.", "heads.head."),
    ],
)


@dataclass(frozen=True)
class ModelType:
    """A ViT that Hugging Face and timm have; names are timm's and those of Hugging Face's files."""

    model: str  # Hugging Face's class
    architecture: str  # timm's name of it, with a place for the size
    outer: Names
    layer: Names  # of the parts of a layer
    mlp: Names
    gated_mlp: Names = ()  # instead of `mlp`, if the config asks for it
    layers: str = "encoder.layer.*."
    attention: str = "attention.attention."
    parts: tuple[str, str, str] = ("query", "key", "value")
    kinds: tuple[str, ...] = ("weight", "bias")
    eps: float = 1e-6  # what timm's norms add to the variance


_OUTER = [
    ("cls_token", "embeddings.cls_token"),
    ("pos_embed", "embeddings.position_embeddings"),
    ("reg_token", "embeddings.register_tokens"),
    ("patch_embed.proj.", "embeddings.patch_embeddings.projection."),
    ("norm.", "layernorm."),
]
_ATTENTION = [("attn.qkv.", "attention.attention.qkv."), ("attn.proj.", "attention.output.dense.")]
_NORMS = [("norm1.", "norm1."), ("norm2.", "norm2.")]
_DINOV2 = dict(
    outer=_OUTER,
    layer=[
        *_NORMS,
        *_ATTENTION,
        ("ls1.gamma", "layer_scale1.lambda1"),
        ("ls2.gamma", "layer_scale2.lambda1"),
    ],
    mlp=[("mlp.fc1.", "mlp.fc1."), ("mlp.fc2.", "mlp.fc2.")],
    gated_mlp=[("mlp.fc1.", "mlp.weights_in."), ("mlp.fc2.", "mlp.weights_out.")],
)
# By Hugging Face's `model_type`.
MODEL_TYPES = {
    "vit": ModelType(
        "ViTModel",
        "vit_{}_patch16_224",
        outer=_OUTER,
        layer=[("norm1.", "layernorm_before."), ("norm2.", "layernorm_after."), *_ATTENTION],
        mlp=[("mlp.fc1.", "intermediate.dense."), ("mlp.fc2.", "output.dense.")],
    ),
    "dinov2": ModelType("Dinov2Model", "vit_{}_patch14_dinov2", **_DINOV2),
    "dinov2_with_registers": ModelType("Dinov2WithRegistersModel", "vit_{}_patch14_reg4_dinov2", **_DINOV2),
    "dinov3_vit": ModelType(
        "DINOv3ViTModel",
        "vit_{}_patch16_dinov3",
        outer=[
            ("cls_token", "embeddings.cls_token"),
            ("reg_token", "embeddings.register_tokens"),
            ("patch_embed.proj.", "embeddings.patch_embeddings."),
            ("norm.", "norm."),
        ],
        layer=[
            *_NORMS,
            ("attn.qkv.", "attention.qkv."),
            ("attn.q_bias", "attention.q_proj.bias"),
            ("attn.v_bias", "attention.v_proj.bias"),
            ("attn.proj.", "attention.o_proj."),
            ("gamma_1", "layer_scale1.lambda1"),
            ("gamma_2", "layer_scale2.lambda1"),
            ("mlp.fc2.", "mlp.down_proj."),
        ],
        mlp=[("mlp.fc1.", "mlp.up_proj.")],
        gated_mlp=[("mlp.fc1_g.", "mlp.gate_proj."), ("mlp.fc1_x.", "mlp.up_proj.")],
        layers="layer.*.",
        attention="attention.",
        parts=("q_proj", "k_proj", "v_proj"),
        kinds=("weight",),  # the keys have no bias
        eps=1e-5,
    ),
}


def of_hugging_face(config: Mapping[str, Any]) -> Naming:
    """The names of timm's network (in place of this package's) and of Hugging Face's files."""
    found = MODEL_TYPES[config["model_type"]]
    is_gated = config.get("use_swiglu_ffn") or config.get("use_gated_mlp")
    layer = [*found.layer, *(found.gated_mlp if is_gated else found.mlp)]
    return Naming(
        f"Hugging Face's {found.model}",
        [*found.outer, *_inside("blocks.*.", found.layers, layer)],
        f"{found.attention}qkv",
        tuple((found.attention + part, 1) for part in found.parts),
        found.kinds,
    )


def _through_timm(names: Names) -> Names:
    """Names here and in Hugging Face's files, of those in timm and in these files."""
    in_files = dict(names)
    return [(ours, in_files[timm]) for ours, timm in TIMM.names if timm in in_files]


HUGGING_FACE = Naming(
    "Hugging Face's Dinov2Model",
    [
        *_through_timm(of_hugging_face(dict(model_type="dinov2")).names),
        (MASK_TOKEN, "embeddings.mask_token"),
        # ViTModel's names are read only: the first of two names is written.
        *_through_timm(of_hugging_face(dict(model_type="vit")).names),
    ],
    qkv="attention.attention.qkv",
    parts=of_hugging_face(dict(model_type="dinov2")).parts,
)
