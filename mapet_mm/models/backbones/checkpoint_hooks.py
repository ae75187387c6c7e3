"""Weights of other networks, adapted to a ViT while it loads them: names, LayerScale, position embeddings."""

import re
from collections.abc import Iterable, Mapping
from math import isqrt, prod
from typing import Any

import torch
from mmengine.logging import print_log
from mmpretrain.models.utils import resize_pos_embed
from torch import Tensor, nn

from mapet_mm.utils.errors import UserError

# BEiT's names of LayerScale and the plain ViT's; and the linear layer before each.
LAYER_SCALES = {"gamma_1": "attn.gamma1.weight", "gamma_2": "ffn.gamma2.weight"}
SCALED = {"attn.gamma1.weight": "attn.proj", "ffn.gamma2.weight": "ffn.layers.1"}
SCALE = re.compile(rf"(layers\.\d+\.)({'|'.join(map(re.escape, SCALED))})")
# Key of the grid of (rows, columns) of patches in a state dict's metadata of the backbone.
PATCH_GRID = "patch_grid"
RELATIVE_POSITIONS = ("relative_position_bias_table", "rel_pos_bias.")
# Where MMPretrain's `TIMMBackbone`, and what is made of it, have the weights of timm's network.
OF_TIMM = "timm_model."


class CheckpointNamesError(UserError, ValueError):
    """A checkpoint that has nothing of the backbone."""


def record_grid(vit: nn.Module, state_dict: Mapping, prefix: str, local_metadata: dict[str, Any]) -> None:
    """State dict hook: note the patch grid in the metadata that PyTorch keeps with a state dict."""
    local_metadata[PATCH_GRID] = tuple(vit.patch_resolution)


def adapt_checkpoint(
    vit: nn.Module, state_dict: dict[str, Tensor], prefix: str, local_metadata: Mapping[str, Any]
) -> None:
    """Make a state dict one of this `MaPeTViT`, in place: it keeps the features of its own network.

    Raises:
        ValueError: no layer of the backbone is there, or relative positions, or an unknown patch grid.
    """
    own = vit.state_dict()
    if not prefix:  # a whole model may be given weights that are not its backbone's; a backbone alone may not
        refuse_others(own, state_dict)
    renamed = beit_to_vit(state_dict, prefix)
    if renamed:
        print_log(f"Renamed the parameters of {renamed} BEiT layers to a plain ViT's.", "current")
    leave_pretraining(own, state_dict, prefix)
    fill_layer_scales(own, state_dict, prefix)
    fold_layer_scales(own, state_dict, prefix)
    fit_bands(own, state_dict, prefix, "patch_embed.projection.weight")
    fit_positions(vit, state_dict, prefix, local_metadata.get(PATCH_GRID))


def refuse_others(own: Mapping[str, Tensor], state_dict: Mapping[str, Tensor]) -> None:
    """Raise CheckpointNamesError if a state dict has other names than a backbone, and none of its layers."""
    layers = {name for name in own if name.startswith("layers.")}
    others = [name for name in state_dict if name not in own and name != "mask_token"]
    if others and layers.isdisjoint(state_dict):
        remedy = remedy_for(
            others, "give the `init_cfg` a `prefix`, or convert the weights with `mapet-mm convert`"
        )
        raise CheckpointNamesError(
            f"the checkpoint has none of the backbone's layers, but `{others[0]}`, ...: {remedy}"
        )


def fit_bands(own: Mapping[str, Tensor], state_dict: dict[str, Tensor], prefix: str, name: str) -> None:
    """Bring the patch embedding of RGB images in a state dict, in place, to the backbone's number of bands.

    Each of the N bands gets the mean of red, green and blue times 3 / N: bands that are alike answer as grey.

    Args:
        own: the backbone's weights.
        state_dict: those that are loaded.
        prefix: of their names.
        name: of the patch embedding's weight.

    Raises:
        ValueError: the weights are of other bands than RGB.
    """
    weight = state_dict.get(prefix + name)
    if weight is None or weight.ndim != 4 or weight.shape[1] == own[name].shape[1]:
        return
    num_bands = own[name].shape[1]
    if weight.shape[1] != 3:
        raise ValueError(
            f"the checkpoint's patches have {weight.shape[1]} bands, the backbone's {num_bands}: only those "
            "of RGB fit any number"
        )
    mean = weight.mean(dim=1, keepdim=True) * 3 / num_bands
    state_dict[prefix + name] = mean.repeat(1, num_bands, 1, 1)
    print_log(f"`{prefix + name}`: each of {num_bands} bands has RGB's mean times 3/{num_bands}.", "current")


def remedy_for(names: Iterable[str], otherwise: str) -> str:
    """What to do with weights none of which a model has: `otherwise`, unless they are a ViT's of timm."""
    if any(OF_TIMM in name or name.startswith("blocks.") for name in names):
        return (
            'they are of a ViT of timm, for which the backbone is dict(type="mapet_mm.TIMMViT", '
            'model_name="RUN", ...), RUN being the folder of `mapet-mm pretrain`, its epoch_N.pth or RUN/timm'
        )
    return otherwise


def leave_pretraining(own: Mapping[str, Tensor], state_dict: dict[str, Tensor], prefix: str) -> None:
    """Drop a pre-training's mask token, in place, and bring the norm after its last layer to the backbone's.

    Fine-tuning leaves out the pre-training's `ln1` and normalises the mean of the patches by an `ln2` of its
    own, which starts as usual. MMEngine would report both as errors.
    """
    if "mask_token" in own or state_dict.pop(f"{prefix}mask_token", None) is None:
        return
    print_log(f"Dropped `{prefix}mask_token`: only pre-training masks patches.", "current")
    for name in ("ln1.weight", "ln1.bias"):
        if name not in own and state_dict.pop(prefix + name, None) is not None:
            print_log(f"Dropped `{prefix}{name}`: the backbone has no norm after its last layer.", "current")
    for name in ("ln2.weight", "ln2.bias"):
        if name in own and prefix + name not in state_dict:
            state_dict[prefix + name] = own[name].clone()
            print_log(f"`{prefix}{name}` starts anew: pre-training has no norm of the mean.", "current")


def beit_to_vit(state_dict: dict[str, Tensor], prefix: str = "") -> int:
    """Rename a BEiT backbone's parameters in place, and return the number of layers renamed (0: a plain ViT).

    With absolute position embeddings the two are the same network under other names; BEiT may keep the bias
    of queries and values apart, with none for the keys.

    Raises:
        ValueError: the weights have relative position biases, which a plain ViT lacks.
    """
    pattern = re.compile(re.escape(prefix) + r"(layers\.\d+\.)(gamma_1|attn\.q_bias)")
    layers = set()  # the beginnings of their parameters' names
    for name in state_dict:
        if name.startswith(prefix) and any(part in name for part in RELATIVE_POSITIONS):
            raise ValueError(f"`{name}`: a plain ViT has no relative position biases; use `BEiTViT`")
        found = pattern.fullmatch(name)
        if found:
            layers.add(prefix + found[1])
    for layer in layers:
        for old, new in LAYER_SCALES.items():
            if layer + old in state_dict:  # not with `layer_scale_init_value=0`
                state_dict[layer + new] = state_dict.pop(layer + old)
        query_bias = state_dict.pop(f"{layer}attn.q_bias", None)
        value_bias = state_dict.pop(f"{layer}attn.v_bias", None)
        if query_bias is not None:
            key_bias = torch.zeros_like(query_bias)
            state_dict[f"{layer}attn.qkv.bias"] = torch.cat([query_bias, key_bias, value_bias])
    return len(layers)


def fill_layer_scales(own: Mapping[str, Tensor], state_dict: dict[str, Tensor], prefix: str) -> None:
    """Give ones, in place, to each LayerScale of a backbone whose layer is there without any.

    Otherwise the layer would keep its initial scale and give other features than the checkpoint's network.
    """
    filled = []
    for name, value in own.items():
        scale = SCALE.fullmatch(name)
        if scale is None or prefix + name in state_dict:
            continue
        projection = state_dict.get(f"{prefix}{scale[1]}attn.proj.weight")
        if projection is not None:
            state_dict[prefix + name] = projection.new_ones(value.shape)
            filled.append(name)
    if filled:
        print_log(f"Filled {len(filled)} LayerScales with one: the checkpoint has none.", "current")


def fold_layer_scales(own: Mapping[str, Tensor], state_dict: dict[str, Tensor], prefix: str) -> None:
    """Multiply LayerScales that a backbone lacks into the layers before them, in place."""
    scales = [name for name in state_dict if name.startswith(prefix) and name.endswith(tuple(SCALED))]
    to_fold = [name for name in scales if name.removeprefix(prefix) not in own]
    if not to_fold:
        return
    state_dict.update(fold_layer_scale(state_dict, to_fold))
    for name in to_fold:
        del state_dict[name]
    print_log(f"Folded {len(to_fold)} LayerScales: the backbone has none.", "current")


def fold_layer_scale(weights: Mapping[str, Tensor], scales: Iterable[str] | None = None) -> dict[str, Tensor]:
    """A plain ViT's weights with these LayerScales, or all, multiplied in float32 into the layers before."""
    folded = dict(weights)
    if scales is None:
        scales = [name for name in weights if name.endswith(tuple(SCALED))]
    for scale in scales:
        end = next(end for end in SCALED if scale.endswith(end))
        linear = scale.removesuffix(end) + SCALED[end]
        factor = folded.pop(scale).float()
        folded[f"{linear}.weight"] = folded[f"{linear}.weight"].float() * factor[:, None]
        folded[f"{linear}.bias"] = folded[f"{linear}.bias"].float() * factor
    return folded


def fit_positions(
    vit: nn.Module, state_dict: dict[str, Tensor], prefix: str, recorded: tuple[int, int] | None = None
) -> None:
    """Bring the position embeddings of a state dict, in place, to the backbone's class token and grid."""
    name = f"{prefix}pos_embed"
    own = tuple(vit.patch_resolution)
    if name not in state_dict:
        return
    # Positions of the class token, if it is there, and of the patches: 1 0|1 D and 1 N D.
    num_class_tokens = int(f"{prefix}cls_token" in state_dict)
    of_class, of_patches = state_dict[name].tensor_split([num_class_tokens], dim=1)
    grid = source_grid(of_patches.shape[1], own, recorded, vit.pretrained_grid)
    if grid == own and of_class.shape[1] == vit.num_extra_tokens:
        return  # untouched: joined again, a shard would be the whole in PyTorch 2.15
    if grid != own:
        print_log(f"Resized `{name}` from {grid} to {own} patches.", "current")
        of_patches = resize_pos_embed(of_patches, grid, own, vit.interpolate_mode, num_extra_tokens=0)
    if of_class.shape[1] != vit.num_extra_tokens:
        of_class = vit.pos_embed[:, : vit.num_extra_tokens].detach().to(of_patches)
    state_dict[name] = torch.cat([of_class, of_patches], dim=1)


def source_grid(
    num_patches: int,
    own: tuple[int, int],
    recorded: tuple[int, int] | None,
    told: tuple[int, int] | None,
) -> tuple[int, int]:
    """The (rows, columns) of a checkpoint's position embeddings.

    What the checkpoint records counts, then what the user says (`pretrained_grid`), then a square. A number
    of patches does not say which way round an rectangular grid lies.

    Raises:
        ValueError: the grid cannot be known.
    """
    for grid in (recorded, told):
        if grid is not None and prod(grid) == num_patches:
            return tuple(grid)
    square = (isqrt(num_patches), isqrt(num_patches))
    could_be_own = prod(own) == num_patches and own != square
    if prod(square) == num_patches and not could_be_own:
        return square
    raise ValueError(
        f"the checkpoint has positions of {num_patches} patches and does not say in which grid; the backbone "
        f"has {own}: set its `pretrained_grid` to the (rows, columns) of patches that it was trained on"
    )
