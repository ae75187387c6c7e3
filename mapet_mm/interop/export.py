"""Export weights to timm, Hugging Face, torchvision and ONNX, with the files that describe the network."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from mapet_mm.interop.convert import FROM_MM, StateDict, network
from mapet_mm.interop.description import ENTRY, Description, read_description
from mapet_mm.interop.hf_export import hf_config, hf_preprocessor
from mapet_mm.interop.like_start import write_like_start
from mapet_mm.interop.model_card import write_model_card
from mapet_mm.interop.onnx_export import SHAPES, write_onnx
from mapet_mm.interop.timm_export import timm_call, timm_config
from mapet_mm.models.backbones.checkpoint_hooks import fold_layer_scale
from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.commands import loading_call
from mapet_mm.utils.run_folder import EXPORTS
from mapet_mm.weight_files import write_weights

FOLDERS = ("timm", "hf")  # libraries that load a folder
FOLDED = ("timm", "torchvision")  # networks without LayerScale
# What a checkpoint of ours keeps of its metadata.
KEPT = ("cfg", "dataset_meta", ENTRY, EXPORTS)


def write_export(
    output: Path, target: str, state_dict: Mapping[str, Tensor], meta: Mapping[str, Any], fold: bool = False
) -> str:
    """Write weights under another library's names, with the files that it needs.

    Args:
        output: a .safetensors or .pth file; for timm and Hugging Face also a folder that they load without
            further arguments, with a model card; for ONNX an .onnx file.
        target: 'mm' | 'reference' | 'timm' | 'hf' | 'torchvision' | 'onnx'.
        state_dict: weights under this package's names.
        meta: metadata of the weights' file, with the description of its network and images.
        fold: for timm, fold LayerScale into the layers before it; for torchvision this is always done.

    Returns:
        Lines about how to load `output`.

    Raises:
        ValueError: the weights do not fit the other network, or a folder's content is not known.
    """
    told = _write(output, target, state_dict, meta, fold)
    if output.is_dir():
        write_model_card(output, target, meta)
    return told


def _write(
    output: Path, target: str, state_dict: Mapping[str, Tensor], meta: Mapping[str, Any], fold: bool
) -> str:
    """Write all but the card."""
    to_folder = output.is_dir() or not output.suffix
    if to_folder and target not in FOLDERS:
        raise ValueError(f"names of {target} go to a file, not to the folder {output}")
    if fold and target not in FOLDED:
        raise ValueError(f"--fold-layerscale is for timm and torchvision, not for names of {target}")
    if target == "mm":
        write_weights(output, state_dict, {name: meta[name] for name in KEPT if name in meta})
        return ""
    if EXPORTS in meta:
        if fold:
            raise ValueError("--fold-layerscale is for this package's own ViT; others keep their layers")
        return write_like_start(output, target, state_dict, meta[EXPORTS])

    weights = network(state_dict)
    if fold:
        weights = fold_layer_scale(weights)
    try:
        description = read_description(meta)
        description.check(weights)
    except ValueError as error:
        if to_folder or target == "onnx":
            raise
        # A file of weights is right without a description; its reader has to know the network.
        write_weights(output, _renamed(weights, target, fold))
        return str(error)

    if target == "onnx":
        write_onnx(output, weights, description)
        return f"{SHAPES}\n{description}"
    if to_folder:
        call = _write_folder(output, target, weights, description, fold)
    else:
        # First the call: it refuses networks that timm does not have.
        call = timm_call(weights, description) if target == "timm" else ""
        write_weights(output, _renamed(weights, target, fold), {ENTRY: asdict(description)})
    return f"{call}\n{description}".strip()


def _renamed(weights: StateDict, target: str, fold: bool) -> StateDict:
    """The weights under the target's names."""
    renamed = FROM_MM[target](weights)
    if not fold:
        return renamed
    # The conversion fills in a LayerScale of ones.
    return {name: v for name, v in renamed.items() if not name.endswith((".ls1.gamma", ".ls2.gamma"))}


def _write_folder(output: Path, target: str, weights: StateDict, description: Description, fold: bool) -> str:
    """Write the weights and what the library reads beside them; return the call that loads the folder."""
    if target == "timm":
        configs = {"config.json": timm_config(weights, description)}
    else:
        configs = {
            "config.json": hf_config(weights, description),
            "preprocessor_config.json": hf_preprocessor(description),
        }
    write_weights(output / "model.safetensors", _renamed(weights, target, fold), {ENTRY: asdict(description)})
    for name, content in configs.items():
        replace_file(output / name, (json.dumps(content, indent=2) + "\n").encode())
    return loading_call(target, output)
