"""Names of a ViT's weights here, in the authors' networks, timm, Hugging Face and torchvision."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mapet_mm.models.backbones.checkpoint_hooks import OF_TIMM

StateDict = dict[str, Tensor]
# Prefixes of names, as (this package's, the other's): the first that fits is replaced, the rest is kept.
Names = list[tuple[str, str]]

# Hugging Face's ViTs that timm has, too.
MODEL_TYPES = {
    "vit": "ViTModel",
    "dinov2": "Dinov2Model",
    "dinov2_with_registers": "Dinov2WithRegistersModel",
    "dinov3_vit": "DINOv3ViTModel",
}
# Where this package's backbone has the weights of a network of timm's that it continues.
TIMM_NETWORK = f"backbone.{OF_TIMM}"
# Weights that only pre-training has; timm has neither of them, Hugging Face has no head.
MASK_TOKEN, TOKEN_HEAD = "backbone.mask_token", "head.projection."


@dataclass(frozen=True)
class Naming:
    """Names in another library's plain ViT."""

    network: str  # for messages
    outer: Names  # prefixes of names
    layer: Names  # prefixes of what follows the number of a layer (`backbone.layers.3.REST`)
    attention: str = ""  # prefix of queries, keys and values, if their library stores them apart
    parts: tuple[tuple[str, int], ...] = ()  # their names, and how many of the three each holds

    def from_mm(self, weights: Mapping[str, Tensor]) -> StateDict:
        """Their names for weights of this package; ValueError where they have none."""
        renamed = _rename(weights, self.outer, self.layer, self.network)
        return self._cut(renamed) if self.parts else renamed

    def to_mm(self, weights: Mapping[str, Tensor]) -> StateDict:
        """Names of this package for their weights; ValueError for unknown names and incomplete attention."""
        joined = self._join(weights) if self.parts else weights
        outer, layer = ([(theirs, ours) for ours, theirs in names] for names in (self.outer, self.layer))
        return _rename(joined, outer, layer, "MaPeTViT")

    def _join(self, weights: Mapping[str, Tensor]) -> StateDict:
        """Join queries, keys and values into one `qkv` per layer."""
        joined = dict(weights)
        first_part = re.compile(rf"(.*\.{re.escape(self.attention)}){self.parts[0][0]}\.(weight|bias)")
        for name in weights:
            found = first_part.fullmatch(name)
            if not found:
                continue
            prefix, kind = found.groups()
            parts = [f"{prefix}{part}.{kind}" for part, _ in self.parts]
            for part in parts:
                if part not in weights:
                    raise ValueError(f"`{part}` is missing: it belongs to `{name}`")
            joined[f"{prefix}qkv.{kind}"] = torch.cat([joined.pop(part) for part in parts])
        return joined

    def _cut(self, weights: StateDict) -> StateDict:
        """Cut each `qkv` into the parts that the network stores apart."""
        cut = {}
        whole = re.compile(rf"(.*\.{re.escape(self.attention)})qkv\.(weight|bias)")
        for name, value in weights.items():
            found = whole.fullmatch(name)
            if not found:
                cut[name] = value
                continue
            prefix, kind = found.groups()
            third = len(value) // 3
            pieces = value.split([third * share for _, share in self.parts])
            for (part, _), piece in zip(self.parts, pieces, strict=True):
                cut[f"{prefix}{part}.{kind}"] = piece.contiguous()
        return cut


def _rename(weights: Mapping[str, Tensor], outer: Names, layer: Names, network: str) -> StateDict:
    """Replace the prefix of each name, and of layers also the prefix after the layer's number."""
    renamed = {}
    for name, value in weights.items():
        beginning, rest = _replace_prefix(name, name, outer, network)
        number = re.match(r"\d+\.", rest)
        if number:
            part = rest[number.end() :]
            rest = number[0] + "".join(_replace_prefix(name, part, layer, network))
        renamed[beginning + rest] = value
    return renamed


def _replace_prefix(name: str, part: str, prefixes: Names, network: str) -> tuple[str, str]:
    """The new prefix of this part of a name, and the rest of the part."""
    for old, new in prefixes:
        if part.startswith(old):
            return new, part.removeprefix(old)
    raise ValueError(f"`{name}`: {network} has nothing of this name")


_TIMM_LAYER = [
    ("ln1.", "norm1."),
    ("ln2.", "norm2."),
    ("attn.qkv.", "attn.qkv."),
    ("attn.proj.", "attn.proj."),
    ("attn.gamma1.weight", "ls1.gamma"),
    ("ffn.layers.0.0.", "mlp.fc1."),
    ("ffn.layers.1.", "mlp.fc2."),
    ("ffn.gamma2.weight", "ls2.gamma"),
]
TIMM = Naming(
    "timm's VisionTransformer",
    [
        ("backbone.cls_token", "cls_token"),
        ("backbone.pos_embed", "pos_embed"),
        ("backbone.patch_embed.projection.", "patch_embed.proj."),
        ("backbone.layers.", "blocks."),
        ("backbone.ln1.", "norm."),
        ("backbone.ln2.", "fc_norm."),
        ("head.fc.", "head."),
    ],
    _TIMM_LAYER,
)
REFERENCE = Naming(
    "the authors' network",
    [*TIMM.outer, (MASK_TOKEN, "mask_positional_token"), (TOKEN_HEAD, "decoder.")],
    _TIMM_LAYER,
    "attn.",
    (("q", 1), ("kv", 2)),
)
# Names of timm's networks and of Hugging Face's files.
_HF_OUTER = [
    ("cls_token", "embeddings.cls_token"),
    ("pos_embed", "embeddings.position_embeddings"),
    ("reg_token", "embeddings.register_tokens"),
    ("patch_embed.proj.", "embeddings.patch_embeddings.projection."),
    ("blocks.", "encoder.layer."),
    ("norm.", "layernorm."),
]
_ATTENTION = [("attn.qkv.", "attention.attention.qkv."), ("attn.proj.", "attention.output.dense.")]
_HF_PARTS = (("query", 1), ("key", 1), ("value", 1))
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


def of_hugging_face(config: Mapping[str, Any]) -> Naming:
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
    return Naming(network, _HF_OUTER, layer, "attention.attention.", _HF_PARTS)


def _through(ours: Names, theirs: Names) -> Names:
    """Names here and in Hugging Face's files, of the names here and in timm, and in timm and these files."""
    known = dict(theirs)
    return [(own, known[timm]) for own, timm in ours if timm in known]


HUGGING_FACE = Naming(
    "Hugging Face's Dinov2Model",
    [*_through(TIMM.outer, _HF_OUTER), (MASK_TOKEN, "embeddings.mask_token")],
    # ViTModel's names are read only: the first of two names is written.
    [*_through(TIMM.layer, _DINOV2_LAYER + _MLP), *_through(TIMM.layer, _VIT_LAYER)],
    "attention.attention.",
    _HF_PARTS,
)
TORCHVISION = Naming(
    "torchvision's VisionTransformer",
    [
        ("backbone.cls_token", "class_token"),
        ("backbone.pos_embed", "encoder.pos_embedding"),
        ("backbone.patch_embed.projection.", "conv_proj."),
        ("backbone.layers.", "encoder.layers.encoder_layer_"),
        ("backbone.ln1.", "encoder.ln."),
        ("head.fc.", "heads.head."),
    ],
    [
        ("ln1.", "ln_1."),
        ("attn.qkv.", "self_attention.in_proj_"),
        ("attn.proj.", "self_attention.out_proj."),
        ("ln2.", "ln_2."),
        ("ffn.layers.0.0.", "mlp.0."),
        ("ffn.layers.1.", "mlp.3."),
    ],
)
