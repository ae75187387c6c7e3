"""State dicts under other names: the authors' <-> mapet_mm <-> timm <-> Hugging Face.

All four describe the same network, so converting changes names and, where queries, keys and values are apart,
cuts or joins matrices; values stay as they are. Models that take the results:

- mapet_mm: `MaPeT` (pre-training) or MMPretrain's `ImageClassifier` on `MaPeTViT` (fine-tuned).
- timm: `VisionTransformer(init_values=0.1)`; fine-tuned with `global_pool="avg"`.
- Hugging Face: `Dinov2Model`, whose network is this one with its final norm (pre-trained weights only). The
  names are those of files on the Hub; load them with `from_pretrained`.
"""

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

StateDict = dict[str, Tensor]
Names = list[tuple[str, str]]
Parts = list[tuple[str, int]]

# Beginnings of names, as (mapet_mm's, the other's): the first that fits is replaced, what follows stays.
REFERENCE = [
    ("backbone.cls_token", "cls_token"),
    ("backbone.pos_embed", "pos_embed"),
    ("backbone.mask_token", "mask_positional_token"),
    ("backbone.patch_embed.projection.", "patch_embed.proj."),
    ("backbone.layers.", "blocks."),
    ("backbone.ln1.", "norm."),
    ("backbone.ln2.", "fc_norm."),
    ("head.projection.", "decoder."),
    ("head.fc.", "head."),
]
# What only pre-training has; timm has no place for either, Hugging Face none for the head.
MASK_TOKEN, TOKEN_HEAD = "backbone.mask_token", "head.projection."
TIMM = [names for names in REFERENCE if names[0] not in (MASK_TOKEN, TOKEN_HEAD)]
HUGGING_FACE = [
    ("backbone.cls_token", "embeddings.cls_token"),
    ("backbone.pos_embed", "embeddings.position_embeddings"),
    ("backbone.mask_token", "embeddings.mask_token"),
    ("backbone.patch_embed.projection.", "embeddings.patch_embeddings.projection."),
    ("backbone.layers.", "encoder.layer."),
    ("backbone.ln1.", "layernorm."),
]
# Within a layer.
REFERENCE_LAYER = TIMM_LAYER = [
    ("ln1.", "norm1."),
    ("ln2.", "norm2."),
    ("attn.qkv.", "attn.qkv."),
    ("attn.proj.", "attn.proj."),
    ("attn.gamma1.weight", "ls1.gamma"),
    ("ffn.layers.0.0.", "mlp.fc1."),
    ("ffn.layers.1.", "mlp.fc2."),
    ("ffn.gamma2.weight", "ls2.gamma"),
]
HUGGING_FACE_LAYER = [
    ("ln1.", "norm1."),
    ("ln2.", "norm2."),
    ("attn.qkv.", "attention.attention.qkv."),
    ("attn.proj.", "attention.output.dense."),
    ("attn.gamma1.weight", "layer_scale1.lambda1"),
    ("ffn.layers.0.0.", "mlp.fc1."),
    ("ffn.layers.1.", "mlp.fc2."),
    ("ffn.gamma2.weight", "layer_scale2.lambda1"),
]
# How queries, keys and values are kept, as (part of the name, how many of the three it holds).
REFERENCE_QKV = [("q", 1), ("kv", 2)]
HUGGING_FACE_QKV = [("query", 1), ("key", 1), ("value", 1)]


def reference_to_mm(state_dict: Mapping[str, Tensor]) -> StateDict:
    """Names of this package for the authors' weights, pre-trained or fine-tuned.

    Args:
        state_dict: the authors' (their checkpoint's `state_dict`), names possibly behind `module.`.

    Raises:
        ValueError: a name that the authors' networks have not.
    """
    named = {name.removeprefix("module."): value for name, value in state_dict.items()}
    joined = _join(named, "attn.", REFERENCE_QKV)
    return _rename(joined, _reverse(REFERENCE), _reverse(REFERENCE_LAYER), "the authors' networks")


def mm_to_reference(state_dict: Mapping[str, Tensor]) -> StateDict:
    """The authors' names for weights of this package: the inverse of :func:`reference_to_mm`."""
    renamed = _rename(_weights(state_dict), REFERENCE, REFERENCE_LAYER, "the authors' networks")
    return _cut(renamed, "attn.", REFERENCE_QKV)


def mm_to_timm(state_dict: Mapping[str, Tensor]) -> StateDict:
    """timm's names for a backbone, or a fine-tuned classifier; mask token and token head are left out.

    Raises:
        ValueError: a name that timm's `VisionTransformer` has no place for.
    """
    return _rename(_weights(state_dict, MASK_TOKEN, TOKEN_HEAD), TIMM, TIMM_LAYER, "timm's VisionTransformer")


def timm_to_mm(state_dict: Mapping[str, Tensor]) -> StateDict:
    """Names of this package for a `VisionTransformer` of timm (with LayerScale and a class token).

    Raises:
        ValueError: a name that a plain ViT with LayerScale has not.
    """
    return _rename(state_dict, _reverse(TIMM), _reverse(TIMM_LAYER), "MaPeTViT")


def mm_to_hf(state_dict: Mapping[str, Tensor]) -> StateDict:
    """Names of Hugging Face's `Dinov2Model` for a pre-trained backbone; the token head is left out.

    Raises:
        ValueError: a fine-tuned model, which has no final norm, or a name that Dinov2 has no place for.
    """
    weights = _weights(state_dict, TOKEN_HEAD)
    if "backbone.ln1.weight" not in weights:
        raise ValueError(
            "the weights have no final norm (`backbone.ln1`), which Hugging Face's Dinov2Model cannot do "
            "without: convert the pre-trained model, or take timm's names for a fine-tuned one"
        )
    renamed = _rename(weights, HUGGING_FACE, HUGGING_FACE_LAYER, "Hugging Face's Dinov2Model")
    if "embeddings.mask_token" in renamed:
        renamed["embeddings.mask_token"] = renamed["embeddings.mask_token"].flatten(0, 1)  # 1 1 D -> 1 D
    return _cut(renamed, "attention.attention.", HUGGING_FACE_QKV)


def hf_to_mm(state_dict: Mapping[str, Tensor]) -> StateDict:
    """Names of this package for a `Dinov2Model`: the inverse of :func:`mm_to_hf`.

    Raises:
        ValueError: a name that a plain ViT with LayerScale has not.
    """
    joined = _join(state_dict, "attention.attention.", HUGGING_FACE_QKV)
    renamed = _rename(joined, _reverse(HUGGING_FACE), _reverse(HUGGING_FACE_LAYER), "MaPeTViT")
    if "backbone.mask_token" in renamed:
        renamed["backbone.mask_token"] = renamed["backbone.mask_token"][None]  # 1 D -> 1 1 D
    return renamed


TO_MM: dict[str, Callable[[Mapping[str, Tensor]], StateDict]] = {
    "mm": dict,
    "reference": reference_to_mm,
    "timm": timm_to_mm,
    "hf": hf_to_mm,
}
FROM_MM: dict[str, Callable[[Mapping[str, Tensor]], StateDict]] = {
    "mm": dict,
    "reference": mm_to_reference,
    "timm": mm_to_timm,
    "hf": mm_to_hf,
}


def _weights(state_dict: Mapping[str, Tensor], *without: str) -> StateDict:
    """The weights of the network alone: no preprocessor's, no tokenizer's, and none behind `without`."""
    others = ("data_preprocessor.", "target_generator.", *without)
    return {name: value for name, value in state_dict.items() if not name.startswith(others)}


def _reverse(names: Names) -> Names:
    return [(new, old) for old, new in names]


def _rename(
    state_dict: Mapping[str, Tensor],
    names: Names,
    layer_names: Names,
    where: str,
) -> StateDict:
    """Replace the beginnings of names, and within a layer (`...I.rest`) the beginning of the rest."""
    renamed = {}
    for name, value in state_dict.items():
        beginning, rest = _replace(name, name, names, where)
        if layer := re.match(r"(\d+\.)(.+)", rest):
            rest = layer[1] + "".join(_replace(name, layer[2], layer_names, where))
        renamed[beginning + rest] = value
    return renamed


def _replace(name: str, part: str, names: Names, where: str) -> tuple[str, str]:
    for old, new in names:
        if part.startswith(old):
            return new, part.removeprefix(old)
    raise ValueError(f"`{name}`: {where} has nothing of this name")


def _join(state_dict: Mapping[str, Tensor], prefix: str, parts: Parts) -> StateDict:
    """Join queries, keys and values to one `qkv` each."""
    joined = dict(state_dict)
    first = parts[0][0]
    pattern = re.compile(rf"(.*\.{re.escape(prefix)}){first}\.(weight|bias)")
    for found in filter(None, map(pattern.fullmatch, state_dict)):
        names = [f"{found[1]}{part}.{found[2]}" for part, _ in parts]
        if missing := [name for name in names if name not in joined]:
            raise ValueError(f"`{missing[0]}` is missing: it belongs to `{found[0]}`")
        pieces = [joined.pop(name) for name in names]
        joined[f"{found[1]}qkv.{found[2]}"] = torch.cat(pieces)
    return joined


def _cut(state_dict: StateDict, prefix: str, parts: Parts) -> StateDict:
    """Cut each `qkv` into what the other network keeps apart."""
    cut = {}
    pattern = re.compile(rf"(.*\.{re.escape(prefix)})qkv\.(weight|bias)")
    for name, value in state_dict.items():
        if found := pattern.fullmatch(name):
            pieces = value.split([len(value) // 3 * share for _, share in parts])
            for (part, _), piece in zip(parts, pieces, strict=True):
                cut[f"{found[1]}{part}.{found[2]}"] = piece.contiguous()
        else:
            cut[name] = value
    return cut
