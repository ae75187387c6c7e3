"""Exports of a training that continued another library's ViT: the class, config and images of its start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mapet_mm.interop.description import Preparation
from mapet_mm.interop.hf_timm import timm_to_hf
from mapet_mm.interop.names import MASK_TOKEN, StateDict
from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.commands import loading_call
from mapet_mm.utils.run_folder import EXPORTS
from mapet_mm.weight_files import write_weights

# Where this package's backbone has the weights of timm's network.
TIMM_NETWORK = "backbone.timm_model."


def exports_entry(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Entry for the `meta` of a training's checkpoints; none if it did not continue another library's ViT."""
    if not cfg.get(EXPORTS):
        return {}
    return {EXPORTS: json.loads(json.dumps(cfg[EXPORTS]))}  # plain, not the config's own dictionaries


def images_of(exports: Mapping[str, Any]) -> Preparation:
    """How the network takes its images."""
    known = exports["images"]
    return Preparation(**{name: tuple(v) if isinstance(v, list) else v for name, v in known.items()})


def write_like_start(
    output: Path, target: str, state_dict: Mapping[str, Tensor], exports: Mapping[str, Any]
) -> str:
    """Write weights as the library of `target` has them.

    Args:
        output: a folder that the library loads, or a .safetensors or .pth file.
        target: 'timm' | 'hf'.
        state_dict: weights under this package's names.
        exports: what the library's files say of the start.

    Returns:
        The call that loads a folder.

    Raises:
        ValueError: another target, or a network that Hugging Face does not have.
    """
    if target not in ("timm", "hf"):
        raise ValueError(f"the weights are those of a ViT of timm: they go to timm or hf, not to {target}")
    if exports.get(target) is None:
        raise ValueError("Hugging Face has no network that computes the same as this ViT of timm")
    config = exports[target]
    weights = {}
    for name, value in state_dict.items():
        if name.startswith(TIMM_NETWORK):
            weights[name.removeprefix(TIMM_NETWORK)] = value
    if target == "hf":
        weights = _with_mask_token(timm_to_hf(weights, config), state_dict, config)
        if config["model_type"] == "vit":
            weights, config = _with_pooler(weights, config)
    if not (output.is_dir() or not output.suffix):
        write_weights(output, weights)
        return ""

    write_weights(output / "model.safetensors", weights)
    files = {"config.json": config}
    if target == "hf":
        files["preprocessor_config.json"] = exports["hf_preprocessor"]
    for name, content in files.items():
        replace_file(output / name, (json.dumps(content, indent=2) + "\n").encode())
    return loading_call(target, output)


def _with_mask_token(
    weights: StateDict, state_dict: Mapping[str, Tensor], config: Mapping[str, Any]
) -> StateDict:
    """The weights with a mask token, which Hugging Face's DINO networks have, if only of zeros."""
    if config["model_type"] == "vit" or not config.get("use_mask_token", True):
        return weights
    mask_token = state_dict.get(MASK_TOKEN, torch.zeros_like(weights["embeddings.cls_token"]))  # 1 1 D
    if config["model_type"] != "dinov3_vit":
        mask_token = mask_token.flatten(0, 1)  # 1 D
    return {**weights, "embeddings.mask_token": mask_token}


def _with_pooler(weights: StateDict, config: Mapping[str, Any]) -> tuple[StateDict, dict[str, Any]]:
    """Weights and config of a ViT whose `pooler_output` is its class token.

    `AutoModel` adds a pooler to every ViT, with random weights where the file has none, and the pre-training
    has none.
    """
    width = config["hidden_size"]
    pooler = {"pooler.dense.weight": torch.eye(width), "pooler.dense.bias": torch.zeros(width)}
    return {**weights, **pooler}, {**config, "pooler_act": "linear", "pooler_output_size": width}
