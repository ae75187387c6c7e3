"""Rename state dicts: the authors' <-> mapet_mm <-> timm <-> Hugging Face, -> torchvision.

All describe the same network, so converting changes names and, where queries, keys and values are separate,
cuts or joins matrices; values do not change. If a network of another origin lacks LayerScale or a bias, the
neutral value is filled in; parts that this network does not have raise an error that names them. Models that
load the results:

- mapet_mm: `MaPeT` (pre-training) or MMPretrain's `ImageClassifier` on `MaPeTViT` (fine-tuned).
- timm: `VisionTransformer` with LayerScale (`init_values`); fine-tuned with `global_pool="avg"`.
- Hugging Face: `Dinov2Model`, the same network with a final norm (pre-trained weights only). The names are
  those of files on the Hub; load them with `from_pretrained`.

Names do not tell architecture and preprocessing; `mapet_mm.interop.export` handles these.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping

import torch
from mmengine.logging import print_log
from torch import Tensor

from mapet_mm.interop.names import StateDict, cut_qkv, join_qkv, rename, reverse
from mapet_mm.interop.torchvision_names import torchvision_names
from mapet_mm.models.utils.beit_names import LAYER_SCALES, beit_to_vit

# (mapet_mm's, the other's), see `mapet_mm.interop.names`.
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
# Weights that only pre-training has; timm has neither of them, Hugging Face has no head.
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
# How queries, keys and values are stored.
REFERENCE_QKV = [("q", 1), ("kv", 2)]
HUGGING_FACE_QKV = [("query", 1), ("key", 1), ("value", 1)]


def reference_to_mm(state_dict: Mapping[str, Tensor]) -> StateDict:
    """Names of this package for the authors' weights, pre-trained or fine-tuned.

    Args:
        state_dict: the authors' (their checkpoint's `state_dict`); names may start with `module.`.

    Raises:
        ValueError: the authors' networks do not have one of the names, or one of theirs is missing.
    """
    joined = join_qkv(_unwrapped(state_dict), "attn.", REFERENCE_QKV)
    return _complete(rename(joined, reverse(REFERENCE), reverse(REFERENCE_LAYER), "the authors' networks"))


def mm_to_reference(state_dict: Mapping[str, Tensor]) -> StateDict:
    """The authors' names for weights of this package: the inverse of `reference_to_mm`.

    Raises:
        ValueError: the authors' networks do not have one of the names, or there is no class token.
    """
    where = "the authors' networks"
    renamed = rename(_with_class_token(network(state_dict), where), REFERENCE, REFERENCE_LAYER, where)
    return cut_qkv(renamed, "attn.", REFERENCE_QKV)


def mm_to_timm(state_dict: Mapping[str, Tensor]) -> StateDict:
    """timm's names for a backbone, or a fine-tuned classifier; mask token and token head are left out.

    Raises:
        ValueError: timm's `VisionTransformer` does not have one of the names.
    """
    weights = network(state_dict, MASK_TOKEN, TOKEN_HEAD)
    return rename(weights, TIMM, TIMM_LAYER, "timm's VisionTransformer")


def timm_to_mm(state_dict: Mapping[str, Tensor], num_patches: int | None = None) -> StateDict:
    """Names of this package for a plain `VisionTransformer` of timm, with or without LayerScale.

    Args:
        state_dict: timm's.
        num_patches: how many patches an image has. It tells whether the class token has a position; if None,
            it has none where the positions could be those of a square of patches alone.

    Raises:
        ValueError: a name is unknown, or one of `MaPeTViT`'s is missing.
    """
    renamed = rename(_unwrapped(state_dict), reverse(TIMM), reverse(TIMM_LAYER), "MaPeTViT")
    return _complete(_with_class_position(renamed, num_patches))


def mm_to_hf(state_dict: Mapping[str, Tensor]) -> StateDict:
    """Names of Hugging Face's `Dinov2Model` for a pre-trained backbone; the token head is left out.

    Raises:
        ValueError: a fine-tuned model without final norm, no class token, or a name that Dinov2 does not
            have.
    """
    where = "Hugging Face's Dinov2Model"
    weights = _with_class_token(network(state_dict, TOKEN_HEAD), where)
    if "backbone.ln1.weight" not in weights:
        raise ValueError(
            f"the weights have no final norm (`backbone.ln1`), which {where} cannot do "
            "without: convert the pre-trained model, or take timm's names for a fine-tuned one"
        )
    renamed = rename(weights, HUGGING_FACE, HUGGING_FACE_LAYER, where)
    if "embeddings.mask_token" in renamed:
        renamed["embeddings.mask_token"] = renamed["embeddings.mask_token"].flatten(0, 1)  # 1 1 D -> 1 D
    return cut_qkv(renamed, "attention.attention.", HUGGING_FACE_QKV)


def hf_to_mm(state_dict: Mapping[str, Tensor]) -> StateDict:
    """Names of this package for a `Dinov2Model`: the inverse of `mm_to_hf`.

    Raises:
        ValueError: a name is unknown, or one of `MaPeTViT`'s is missing.
    """
    joined = join_qkv(_unwrapped(state_dict), "attention.attention.", HUGGING_FACE_QKV)
    renamed = rename(joined, reverse(HUGGING_FACE), reverse(HUGGING_FACE_LAYER), "MaPeTViT")
    if "backbone.mask_token" in renamed:
        renamed["backbone.mask_token"] = renamed["backbone.mask_token"][None]  # 1 D -> 1 1 D
    return _complete(renamed)


def mm_to_torchvision(state_dict: Mapping[str, Tensor]) -> StateDict:
    """torchvision's names for a backbone with its final norm; LayerScale is folded into the layers before it.

    Raises:
        ValueError: no class token, no final norm, or a name that torchvision's ViT does not have.
    """
    return torchvision_names(network(state_dict, MASK_TOKEN, TOKEN_HEAD))


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
    "torchvision": mm_to_torchvision,
}


def network(state_dict: Mapping[str, Tensor], *without: str) -> StateDict:
    """A plain ViT's complete weights, from a checkpoint of this package or of MMPretrain's ViT or BEiT.

    Leaves out preprocessor, tokenizer and names that start with one of `without`. Adds the prefix to a bare
    backbone's names and removes the prefixes of wrappers (`module.`, `_orig_mod.`).

    Raises:
        ValueError: the weights are not a plain ViT's: one is missing or has another shape.
    """
    named = _unwrapped(state_dict)
    if not any(name.startswith("backbone.") for name in named):
        named = {f"backbone.{name}": value for name, value in named.items()}
    beit_to_vit(named, "backbone.")
    others = ("data_preprocessor.", "target_generator.", *without)
    return _complete({name: value for name, value in named.items() if not name.startswith(others)})


def _unwrapped(state_dict: Mapping[str, Tensor]) -> StateDict:
    return {name.replace("_orig_mod.", "").removeprefix("module."): v for name, v in state_dict.items()}


def _complete(state_dict: Mapping[str, Tensor]) -> StateDict:
    """Check that the weights are a complete plain ViT's, and fill in missing optional ones.

    A missing LayerScale becomes ones, a missing bias zeros, so the outputs stay the same.
    """
    weights = dict(state_dict)
    width = _required(weights, "backbone.pos_embed").shape[-1]
    _required(weights, "backbone.patch_embed.projection.weight")
    numbers = (re.match(r"backbone\.layers\.(\d+)\.", name) for name in weights)
    for layer in range(1 + max((int(number[1]) for number in numbers if number), default=-1)):
        _complete_layer(weights, f"backbone.layers.{layer}.", width)
    for module in ("patch_embed.projection", "ln1", "ln2"):
        if (weight := weights.get(f"backbone.{module}.weight")) is not None:
            weights.setdefault(f"backbone.{module}.bias", weight.new_zeros(len(weight)))
    if "backbone.cls_token" not in weights:
        print_log(
            "There is no class token: MaPeTViT takes the weights with `with_cls_token=False`.", "current"
        )
    filled = Counter(re.sub(r"\d+", "I", name, count=1) for name in weights.keys() - state_dict.keys())
    for name, count in sorted(filled.items()):
        value = "one" if "gamma" in name else "zero"
        print_log(
            f"Filled {count} x `{name}` with {value}: there is none, and outputs stay the same.", "current"
        )
    return weights


def _complete_layer(weights: StateDict, layer: str, width: int) -> None:
    known = tuple(name for name, _ in TIMM_LAYER)
    for name in weights:
        if name.startswith(layer) and not name.removeprefix(layer).startswith(known):
            raise ValueError(f"`{name}` (this package's name): a plain ViT's layer has nothing of this name")
    hidden = _required(weights, f"{layer}ffn.layers.1.weight").shape[-1]
    shapes = {
        "ln1": (width,),
        "attn.qkv": (3 * width, width),
        "attn.proj": (width, width),
        "ln2": (width,),
        "ffn.layers.0.0": (hidden, width),
        "ffn.layers.1": (width, hidden),
    }
    for module, shape in shapes.items():
        weight = _required(weights, f"{layer}{module}.weight", shape)
        weights.setdefault(f"{layer}{module}.bias", weight.new_zeros(len(weight)))
    for scale in LAYER_SCALES.values():
        weights.setdefault(f"{layer}{scale}", weight.new_ones(width))


def _required(weights: StateDict, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
    if name not in weights:
        raise ValueError(f"`{name}` (this package's name) is missing: the weights are no whole plain ViT's")
    if shape and weights[name].shape != shape:
        raise ValueError(
            f"`{name}` (this package's name) has shape {tuple(weights[name].shape)}, a plain ViT's is {shape}"
        )
    return weights[name]


def _with_class_token(weights: StateDict, where: str) -> StateDict:
    if "backbone.cls_token" not in weights:
        raise ValueError(f"the weights have no class token (`backbone.cls_token`), which {where} has always")
    return weights


def _with_class_position(weights: StateDict, num_patches: int | None) -> StateDict:
    """Add a zero position for the class token if timm adds none to it (`no_embed_class`)."""
    positions = weights.get("backbone.pos_embed")
    if positions is None or "backbone.cls_token" not in weights:
        return weights
    count = positions.shape[1]
    without_class = _is_square(count) if num_patches is None else count == num_patches
    if not without_class:
        return weights
    grid = f"{count} positions of the patches"
    line = f"Put a zero position before the {grid}: the network's class token has none."
    if num_patches is None:
        line += (
            f" If they are {count - 1} patches and the class token instead: "
            f"mapet_mm.interop.convert.timm_to_mm(weights, num_patches={count - 1})."
        )
    print_log(line, "current")
    return weights | {"backbone.pos_embed": torch.cat([torch.zeros_like(positions[:, :1]), positions], dim=1)}


def _is_square(count: int) -> bool:
    return math.isqrt(count) ** 2 == count
