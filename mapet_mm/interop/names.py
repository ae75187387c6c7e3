"""Rename the weights of one ViT to those of another: names by their prefixes, and `qkv` joined or cut."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

StateDict = dict[str, Tensor]
# Prefixes of names, as (one network's, the other's): the first that fits is replaced, the rest is kept.
Names = list[tuple[str, str]]
# How queries, keys and values are stored, as (part of the name, how many of the three it holds).
Parts = list[tuple[str, int]]


def reverse(names: Names) -> Names:
    """The names for the way back."""
    return [(new, old) for old, new in names]


def rename(state_dict: Mapping[str, Tensor], names: Names, layer_names: Names, where: str) -> StateDict:
    """Replace the prefixes of names, and within a layer (`...I.rest`) the prefix of the rest.

    Raises:
        ValueError: no prefix fits a name; `where` says which network has nothing of it.
    """
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


def join_qkv(state_dict: Mapping[str, Tensor], prefix: str, parts: Parts) -> StateDict:
    """Join queries, keys and values into one `qkv` per layer."""
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


def cut_qkv(state_dict: StateDict, prefix: str, parts: Parts) -> StateDict:
    """Cut each `qkv` into the parts that the other network stores separately."""
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
