"""Export weights to timm, Hugging Face, torchvision and ONNX: other names, and files that say the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mapet_mm.interop.convert import FROM_MM, StateDict, network, timm_to_hf
from mapet_mm.interop.description import ENTRY, ContinuedViT, Description, read_description
from mapet_mm.interop.model_card import write_model_card
from mapet_mm.interop.names import MASK_TOKEN, TIMM_NETWORK
from mapet_mm.interop.networks import hf_config, timm_config
from mapet_mm.interop.onnx_export import SHAPES, write_onnx
from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.commands import loading_call
from mapet_mm.utils.run_folder import EXPORTS
from mapet_mm.weight_files import write_weights

FOLDERS = ("timm", "hf")  # libraries that load a folder
# What a checkpoint of ours keeps of its metadata.
KEPT = ("cfg", "dataset_meta", ENTRY, EXPORTS)


@dataclass(frozen=True)
class Export:
    """What is written for a library."""

    weights: StateDict  # under its names
    files: Mapping[str, Any] = field(default_factory=dict)  # that its folder has beside them, as JSON
    words: str = ""  # for the user
    metadata: Mapping[str, Any] = field(default_factory=dict)  # of the weights' file


def write_export(output: Path, target: str, state_dict: Mapping[str, Tensor], meta: Mapping[str, Any]) -> str:
    """Write weights under another library's names, with the files that it needs.

    Args:
        output: a .safetensors or .pth file; for timm and Hugging Face also a folder that they load without
            further arguments, with a model card; for ONNX an .onnx file.
        target: 'mm' | 'reference' | 'timm' | 'hf' | 'torchvision' | 'onnx'.
        state_dict: weights under this package's names.
        meta: metadata of the weights' file, which describes its network and images.

    Returns:
        Lines about how to load `output`.

    Raises:
        ValueError: the weights do not fit the other network, or a folder's content is not known.
    """
    to_folder = output.is_dir() or not output.suffix
    if to_folder and target not in FOLDERS:
        raise ValueError(f"names of {target} go to a file, not to the folder {output}")
    if target == "mm":
        write_weights(output, state_dict, {name: meta[name] for name in KEPT if name in meta})
        return ""
    if EXPORTS in meta:
        export = _of_continued(target, state_dict, ContinuedViT.read(meta[EXPORTS]))
    elif target == "onnx":
        weights = network(state_dict)
        description = _description(weights, meta)
        write_onnx(output, weights, description)
        return f"{SHAPES}\n{description}"
    else:
        export = _of_own(target, state_dict, meta, to_folder)

    if not to_folder:
        write_weights(output, export.weights, export.metadata)
        return export.words
    write_weights(output / "model.safetensors", export.weights, export.metadata)
    for name, content in export.files.items():
        replace_file(output / name, (json.dumps(content, indent=2) + "\n").encode())
    write_model_card(output, target, meta)
    return f"{loading_call(target, output)}\n{export.words}".strip()


def _of_own(
    target: str, state_dict: Mapping[str, Tensor], meta: Mapping[str, Any], to_folder: bool
) -> Export:
    """This package's ViT; of one without a description only the weights, for a file."""
    weights = network(state_dict)
    try:
        description = _description(weights, meta)
    except ValueError as error:
        if to_folder:
            raise
        # A file of weights is right without a description; its reader has to know the network.
        return Export(FROM_MM[target](weights), words=str(error))

    files = {}
    words = str(description)
    if target == "timm":
        # Also for a file: it refuses networks that timm does not have.
        config = timm_config(weights, description)
        files["config.json"] = config
        if not to_folder:
            arguments = {**config["model_args"], "num_classes": config["num_classes"]}
            listed = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
            words = f"timm.models.VisionTransformer({listed})\n{words}"
    elif target == "hf" and to_folder:
        files["config.json"] = hf_config(weights, description)
        files["preprocessor_config.json"] = description.in_hugging_face()
    return Export(FROM_MM[target](weights), files, words, {ENTRY: asdict(description)})


def _description(weights: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Description:
    """The description of these weights; ValueError if there is none."""
    description = read_description(meta)
    description.check(weights)
    return description


def _of_continued(target: str, state_dict: Mapping[str, Tensor], vit: ContinuedViT) -> Export:
    """A continued ViT, as the class of its start.

    Raises:
        ValueError: another target, or a network that Hugging Face does not have.
    """
    if target not in FOLDERS:
        raise ValueError(f"the weights are those of a ViT of timm: they go to timm or hf, not to {target}")
    weights = {}
    for name, value in state_dict.items():
        if name.startswith(TIMM_NETWORK):
            weights[name.removeprefix(TIMM_NETWORK)] = value
    if target == "timm":
        return Export(weights, {"config.json": vit.timm})
    if vit.hf is None:
        raise ValueError("Hugging Face has no network that computes the same as this ViT of timm")

    config = vit.hf
    weights = timm_to_hf(weights, config)
    if config["model_type"] == "vit":
        # `AutoModel` adds a pooler to every ViT, with random weights where the file has none; this one gives
        # the class token.
        width = config["hidden_size"]
        weights["pooler.dense.weight"] = torch.eye(width)
        weights["pooler.dense.bias"] = torch.zeros(width)
        config = {**config, "pooler_act": "linear", "pooler_output_size": width}
    elif config.get("use_mask_token", True):
        # Hugging Face's DINO networks have one, if only of zeros.
        mask_token = state_dict.get(MASK_TOKEN, torch.zeros_like(weights["embeddings.cls_token"]))  # 1 1 D
        if config["model_type"] != "dinov3_vit":
            mask_token = mask_token.flatten(0, 1)  # 1 D
        weights["embeddings.mask_token"] = mask_token
    return Export(weights, {"config.json": config, "preprocessor_config.json": vit.hf_preprocessor})
