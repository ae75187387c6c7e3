"""Rename state dicts: the authors' <-> mapet_mm <-> timm <-> Hugging Face, -> torchvision.

All describe the same network, so converting changes names and, where queries, keys and values are separate,
cuts or joins matrices; values do not change. If a network of another origin lacks LayerScale or a bias, the
neutral value is filled in; parts that this network does not have raise an error that names them. Models that
load the results:

- mapet_mm: `MaPeT` (pre-training) or MMPretrain's `ImageClassifier` on `MaPeTViT` (fine-tuned).
- timm: `VisionTransformer` with LayerScale (`init_values`); fine-tuned with `global_pool="avg"`.
- Hugging Face: `Dinov2Model`, the same network with a final norm (pre-trained weights only). The names are
  those of files on the Hub; load them with `from_pretrained`.
- torchvision: `VisionTransformer`; LayerScale is folded into the layers before it.

Names do not tell architecture and preprocessing; `mapet_mm.interop.export` handles these.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mapet_mm.interop.names import (
    HUGGING_FACE,
    MASK_TOKEN,
    REFERENCE,
    TIMM,
    TOKEN_HEAD,
    TORCHVISION,
    Naming,
    StateDict,
    of_hugging_face,
)
from mapet_mm.models.backbones.checkpoint_hooks import SCALED, beit_to_vit, fold_layer_scale
from mapet_mm.models.utils.low_rank import ADAPTERS
from mapet_mm.utils.errors import listed
from mapet_mm.weight_files import without_wrappers

# Parts of pre-trained models besides the encoder, and heads of classifiers.
DECODERS = ("decoder", "mask_token", "head.", "fc.", "classifier.", "pooler.")
CLASS_TOKEN, POSITIONS, FINAL_NORM = "backbone.cls_token", "backbone.pos_embed", "backbone.ln1.weight"
# Names of the patch embedding, by which a plain ViT is found in a file: of this package, timm, Hugging Face.
PATCH_EMBEDDINGS = (
    "patch_embed.projection.weight",
    "patch_embed.proj.weight",
    "embeddings.patch_embeddings.projection.weight",
)
NOT_TIMM = ("embeddings.mask_token", "pooler.")  # of Hugging Face's files
LAYER_NUMBER = re.compile(r"backbone\.layers\.(\d+)\.")
# The linear layers and norms of a layer; each has a weight and may have a bias.
LAYER = ("ln1", "attn.qkv", "attn.proj", "ln2", "ffn.layers.0.0", "ffn.layers.1")


def reference_to_mm(state_dict: Mapping[str, Tensor]) -> StateDict:
    """Names of this package for the authors' weights, pre-trained or fine-tuned.

    Raises:
        ValueError: `MaPeTViT` has nothing of one of the names, or one of its weights is missing.
    """
    return complete(REFERENCE.to_mm(without_wrappers(state_dict)))


def mm_to_reference(state_dict: Mapping[str, Tensor]) -> StateDict:
    """The authors' names for weights of this package: the inverse of `reference_to_mm`.

    Raises:
        ValueError: the authors' networks do not have one of the names, or there is no class token.
    """
    return REFERENCE.from_mm(_with(REFERENCE, network(state_dict), CLASS_TOKEN))


def mm_to_timm(state_dict: Mapping[str, Tensor]) -> StateDict:
    """timm's names for a backbone, or a fine-tuned classifier; mask token and token head are left out.

    Raises:
        ValueError: timm's `VisionTransformer` does not have one of the names.
    """
    return TIMM.from_mm(network(state_dict, MASK_TOKEN, TOKEN_HEAD))


def timm_to_mm(state_dict: Mapping[str, Tensor], num_patches: int | None = None) -> StateDict:
    """Names of this package for a plain `VisionTransformer` of timm, with or without LayerScale.

    Args:
        state_dict: timm's.
        num_patches: how many patches an image has. It tells if the class token has a position of its own,
            which is certain only of a square of patches beside it.

    Raises:
        ValueError: a name is unknown, one of `MaPeTViT`'s is missing, or `num_patches` is needed.
    """
    weights = TIMM.to_mm(without_wrappers(state_dict))
    if CLASS_TOKEN in weights and POSITIONS in weights:
        positions = weights[POSITIONS]
        count = positions.shape[1]
        if num_patches is None and math.isqrt(count - 1) ** 2 != count - 1:
            raise ValueError(
                f"{count} positions fit {count - 1} patches with the class token, or {count} "
                "patches alone: give the number of patches (num_patches, --num-patches)"
            )
        if count == num_patches:
            weights[POSITIONS] = torch.cat([torch.zeros_like(positions[:, :1]), positions], dim=1)
    return complete(weights)


def mm_to_hf(state_dict: Mapping[str, Tensor]) -> StateDict:
    """Names of Hugging Face's `Dinov2Model` for a pre-trained backbone; the token head is left out.

    Raises:
        ValueError: a fine-tuned model without final norm, no class token, or a name that Dinov2 does not
            have.
    """
    weights = _with(HUGGING_FACE, network(state_dict, TOKEN_HEAD), CLASS_TOKEN, FINAL_NORM)
    if MASK_TOKEN in weights:
        weights[MASK_TOKEN] = weights[MASK_TOKEN].flatten(0, 1)  # 1 1 D -> 1 D
    return HUGGING_FACE.from_mm(weights)


def hf_to_mm(state_dict: Mapping[str, Tensor]) -> StateDict:
    """Names of this package for a `Dinov2Model`, the inverse of `mm_to_hf`, or for a `ViTModel`.

    A `ViTModel`'s pooler is left out. Its norms add 1e-12 to the variance, `MaPeTViT`'s 1e-6.

    Raises:
        ValueError: a name is unknown, or one of `MaPeTViT`'s is missing.
    """
    weights = without_wrappers(state_dict)
    kept = {name: value for name, value in weights.items() if not name.startswith("pooler.")}
    renamed = HUGGING_FACE.to_mm(kept)
    if MASK_TOKEN in renamed:
        renamed[MASK_TOKEN] = renamed[MASK_TOKEN][None]  # 1 D -> 1 1 D
    return complete(renamed)


def hf_to_timm(weights: StateDict, config: Mapping[str, Any]) -> StateDict:
    """timm's names for the weights in a file of Hugging Face; mask token and pooler are left out.

    Raises:
        ValueError: a name is unknown, or a part of the attention is missing.
    """
    kept = {name: value for name, value in weights.items() if not name.startswith(NOT_TIMM)}
    renamed = of_hugging_face(config).to_mm(kept)
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
    return of_hugging_face(config).from_mm(kept)


def mm_to_torchvision(state_dict: Mapping[str, Tensor]) -> StateDict:
    """torchvision's names for a backbone with its final norm; LayerScale is folded into the layers before it.

    Raises:
        ValueError: no class token, no final norm, or a name that torchvision's ViT does not have.
    """
    weights = _with(
        TORCHVISION,
        network(state_dict, MASK_TOKEN, TOKEN_HEAD),
        CLASS_TOKEN,
        FINAL_NORM,
    )
    return TORCHVISION.from_mm(fold_layer_scale(weights))


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


def as_start(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """The backbone's weights under this package's names, and a line that says what was done.

    Args:
        weights: a plain ViT's, under the names of this package, timm (MAE's, DeiT's and DINO's files have
            these), Hugging Face or the authors; heads and decoders are left out.

    Raises:
        ValueError: the weights fit none of these; the message gives the reason for each.
    """
    weights = without_wrappers(weights)
    prefix = _prefix_of_vit(weights)
    own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    others = [name for name in weights if not name.startswith(prefix)]
    reasons = []
    for origin in ("mm", "timm", "hf", "reference"):
        decoders = []
        if origin in ("timm", "hf"):
            decoders = [name for name in own if name.startswith(DECODERS)]
        kept = {name: value for name, value in own.items() if name not in decoders}
        if origin == "mm":
            kept = {f"backbone.{name}": value for name, value in own.items()}
        try:
            ours = TO_MM[origin](kept)
        except ValueError as error:
            reasons.append(f"{origin}: {error}")
            continue
        backbone = {name: value for name, value in ours.items() if name.startswith("backbone.")}
        if "backbone.layers.0.ln1.weight" in backbone:
            words = f"names of {origin}"
            if others or decoders:
                words += f", without {', '.join(sorted({name.split('.')[0] for name in others + decoders}))}"
            return backbone, words
    raise ValueError(f"these are not the weights of a plain ViT ({'; '.join(reasons)})")


def _prefix_of_vit(names: Iterable[str]) -> str:
    """What is before a ViT's names in a file; ValueError if it has several ViTs under unusual prefixes."""
    prefixes = set()
    for name in names:
        for embedding in PATCH_EMBEDDINGS:
            if name == embedding or name.endswith(f".{embedding}"):
                prefixes.add(name.removesuffix(embedding))
    for usual in ("backbone.", ""):
        if usual in prefixes:
            return usual
    if len(prefixes) > 1:
        raise ValueError(f"it has several networks, under {listed(sorted(prefixes), most=4)}")
    return prefixes.pop() if prefixes else ""


def network(state_dict: Mapping[str, Tensor], *without: str) -> StateDict:
    """A plain ViT's complete weights, from a checkpoint of this package or of MMPretrain's ViT or BEiT.

    Leaves out preprocessor, tokenizer, the predictor of a pre-training (`neck.`), adapters, which are in the
    weights already, and names that start with one of `without`. Adds the prefix to a bare backbone's names
    and removes the prefixes of wrappers (`module.`, `_orig_mod.`).

    Raises:
        ValueError: one of a plain ViT's weights is missing.
    """
    named = without_wrappers(state_dict)
    if not any(name.startswith("backbone.") for name in named):
        named = {f"backbone.{name}": value for name, value in named.items()}
    beit_to_vit(named, "backbone.")
    others = ["data_preprocessor.", "target_generator.", ADAPTERS, *without]
    if not num_classes_of(named):  # a classifier's neck is a part of its network
        others.append("neck.")
    return complete({name: value for name, value in named.items() if not name.startswith(tuple(others))})


def complete(state_dict: Mapping[str, Tensor]) -> StateDict:
    """A plain ViT's weights with ones for a missing LayerScale and zeros for a missing bias.

    The outputs stay the same. `MaPeTViT` takes weights without a class token with `with_cls_token=False`.

    Raises:
        ValueError: another weight is missing.
    """
    weights = dict(state_dict)
    numbers = [int(found[1]) for found in map(LAYER_NUMBER.match, weights) if found]
    layers = [f"backbone.layers.{number}." for number in range(1 + max(numbers, default=-1))]
    modules = ["backbone.patch_embed.projection"]
    for layer in layers:
        modules += [layer + name for name in LAYER]
    for name in (POSITIONS, *(f"{module}.weight" for module in modules)):
        if name not in weights:
            raise ValueError(
                f"`{name}` (this package's name) is missing: the weights are not a whole plain ViT's"
            )

    # The final norms may be missing; what is there gets its bias.
    for module in [*modules, "backbone.ln1", "backbone.ln2"]:
        weight = weights.get(f"{module}.weight")
        if weight is not None:
            weights.setdefault(f"{module}.bias", weight.new_zeros(len(weight)))

    width = weights[POSITIONS].shape[-1]
    for layer in layers:
        for scale in SCALED:
            # A tensor for each: files of weights refuse shared memory.
            weights.setdefault(layer + scale, weights[f"{layer}attn.proj.weight"].new_ones(width))
    return weights


def sizes_of(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Width of the tokens, depth and width inside the MLP of a plain ViT, under the names of configs."""
    return dict(
        embed_dims=len(weights["backbone.patch_embed.projection.weight"]),
        num_layers=sum(name.endswith("attn.qkv.weight") for name in weights),
        feedforward_channels=weights["backbone.layers.0.ffn.layers.1.weight"].shape[-1],
    )


def num_classes_of(weights: Mapping[str, Tensor]) -> int:
    """Number of classes of a classifier's head; 0 without one."""
    if "head.fc.weight" not in weights:
        return 0
    return len(weights["head.fc.weight"])


def _with(naming: Naming, weights: StateDict, *names: str) -> StateDict:
    """The weights, if they have these names, which the other network cannot be without."""
    for name in names:
        if name not in weights:
            raise ValueError(f"the weights have no `{name}`, which {naming.network} has always")
    return weights
