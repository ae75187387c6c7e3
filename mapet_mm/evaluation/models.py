"""A config and a checkpoint made into a backbone that gives features."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.registry import init_default_scope
from mmengine.runner.checkpoint import CheckpointLoader
from torch import Tensor, nn

from mapet_mm.evaluation.adapters import TokenBackbone, network_of, swaps_channels
from mapet_mm.registry import MODELS
from mapet_mm.utils.config import pretrained_entries, read_config, scope_of
from mapet_mm.utils.errors import UserError, listed
from mapet_mm.utils.identity import digest
from mapet_mm.weight_files import read_weights

# Parts of a checkpoint beside the layers, without which features are the same: heads, decoders, final norms
# (the config says if "output" has one), and tables that a model computes itself.
OTHER_PARTS = re.compile(
    r"(mask_token|(lm_)?head|fc\.|fc_norm|ln\d|(layer_?)?norm\d*\.|pooler|decoder|neck|classifier"
    r"|cls_classifier|distillation_classifier|projector|predictor|text_|logit_scale|visual_projection"
    r"|data_preprocessor|target_generator|teacher|momentum)|.*\b(attn_mask|relative_coords_table)$"
)


class WeightsError(UserError):
    """A checkpoint that does not fit the config's backbone."""


@dataclass(frozen=True)
class Checkpoint:
    """A backbone with its weights.

    Args:
        name: its column in the table.
        backbone: gives the tokens.
        digest: of the weights, the architecture and the normalisation of images.
        missing: weights that the checkpoint lacks. They are NaN, so features that need them show it.
    """

    name: str
    backbone: TokenBackbone
    digest: str
    missing: tuple[str, ...] = ()


def load_checkpoint(config: str | Config, checkpoint: str | None) -> Checkpoint:
    """Build the backbone of a config's model, load its weights and put it on the device.

    Args:
        config: of a pre-training, a classifier, a segmentor or a bare backbone.
        checkpoint: what a training wrote, or weights of timm or Hugging Face for a wrapper of theirs; None
            for the weights that the config names by `load_from` or `init_cfg`, or random ones.

    Raises:
        UserError: a config without a model or normalisation, or weights that do not fit.
    """
    cfg = read_config(config) if isinstance(config, str) else config
    settings = cfg.get("model")
    if not settings:
        raise UserError(f"config {cfg.filename} has no `model`")
    preprocessor = settings.get("data_preprocessor", cfg.get("data_preprocessor"))
    if preprocessor is None:
        raise UserError(f"config {cfg.filename} has no `data_preprocessor`: add one with `mean` and `std`")
    init_default_scope(scope_of(cfg))
    backbone = settings.get("backbone", settings)
    weights = checkpoint or cfg.get("load_from") or _named_weights(settings)
    torch.manual_seed((cfg.get("randomness") or {}).get("seed") or 0)  # of random weights
    options = {name: one for name, one in backbone.items() if name != "init_cfg" or not weights}
    model = MODELS.build(options)
    missing = []
    if weights:
        missing = load_weights(network_of(model), weights)
    elif hasattr(model, "init_weights"):
        model.init_weights()
    title = Path(cfg.filename or "model").stem + (f", {Path(checkpoint).stem}" if checkpoint else "")
    return checkpoint_of(title, model, preprocessor, {**backbone, "init_cfg": None}, missing)


def checkpoint_of(
    title: str,
    model: nn.Module,
    preprocessor: Mapping[str, Any],
    architecture: Mapping[str, Any],
    missing: Sequence[str] = (),
) -> Checkpoint:
    """A model with its weights, on the device.

    Args:
        title: its name in tables.
        model: as for `TokenBackbone`.
        preprocessor: config with mean and standard deviation.
        architecture: all else that its features depend on, for the digest.
        missing: names of weights that are NaN.
    """
    model.eval()  # MMPretrain's backbones return None
    model.to(get_device())
    preprocessor = MODELS.build({"type": "mmpretrain.ClsDataPreprocessor", **preprocessor}).to(get_device())
    found = _digest(model, architecture, preprocessor)
    return Checkpoint(title, TokenBackbone(model, preprocessor), found, tuple(missing))


def _named_weights(model: Mapping[str, Any]) -> str | None:
    """The file that the `init_cfg` of a model or of its backbone names."""
    for key, init_cfg in pretrained_entries(model, "model"):
        if key.startswith(("model.init_cfg", "model.backbone.init_cfg")):
            if not init_cfg["checkpoint"]:
                raise UserError(f"the config leaves `{key}.checkpoint` open: name the checkpoint")
            return init_cfg["checkpoint"]
    return None


def load_weights(network: nn.Module, path: str) -> list[str]:
    """Load a checkpoint's weights into a network, under whatever prefix the checkpoint has them.

    Returns:
        Names of the weights that the checkpoint lacks. They are set to NaN.

    Raises:
        WeightsError: none of the network's weights are there, or they are there twice; another shape; or
            weights that change features, and the network lacks.
    """
    weights = _as_built(network, _read(path), path)
    prefix = _prefix(list(network.state_dict()), weights, path)
    own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    try:
        keys = network.load_state_dict(own, strict=False)
    except (RuntimeError, ValueError) as error:
        raise WeightsError(f"checkpoint {path}: {str(error).splitlines()[-1].strip()}") from error
    # A model that renames weights while loading reports new names: those are float.
    changing = (name for name in keys.unexpected_keys if name not in own or own[name].is_floating_point())
    if lost := [name for name in changing if not OTHER_PARTS.match(name)]:
        raise WeightsError(
            f"checkpoint {path} has {listed(sorted(lost), most=3)}, which the config's backbone lacks, so "
            "its features would differ: name the config that it was trained with"
        )
    state = network.state_dict()
    for name in keys.missing_keys:
        if state[name].is_floating_point():
            state[name].fill_(float("nan"))
    return list(keys.missing_keys)


def _read(path: str) -> dict[str, Tensor]:
    """The state dict in a file, or at an address that MMEngine knows."""
    if "://" not in path:
        return read_weights(Path(path).expanduser())
    content = CheckpointLoader.load_checkpoint(path, map_location="cpu")
    return content.get("state_dict", content)


def _as_built(network: nn.Module, weights: dict[str, Tensor], path: str) -> dict[str, Tensor]:
    """Weights under the names of a network of Hugging Face, whose modules may differ from those in its files.

    transformers 5 renames modules while its own class loads a file, so that class loads these weights. Under
    the prefix of a training none are found, and they are returned as they are.
    """
    if not hasattr(network, "from_pretrained"):
        return weights
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # a report of missing weights
    try:
        loaded, found = type(network).from_pretrained(
            None, config=network.config, state_dict=dict(weights), output_loading_info=True
        )
    except RuntimeError as error:
        raise WeightsError(f"checkpoint {path}: {str(error).splitlines()[-1].strip()}") from error
    own = {name: value for name, value in loaded.state_dict().items() if name not in found["missing_keys"]}
    others = {name: weights.get(name, torch.zeros(())) for name in found["unexpected_keys"]}
    return {**own, **others} if own else weights


def _prefix(own: list[str], weights: Mapping[str, Tensor], path: str) -> str:
    """The prefix of the network's names in a checkpoint; `backbone.` if two networks fit."""
    wanted = set(own)
    found: Counter[str] = Counter()
    for name in weights:
        parts = name.split(".")
        for cut in range(len(parts)):
            if ".".join(parts[cut:]) in wanted:
                found[".".join([*parts[:cut], ""])] += 1
    best = [prefix for prefix, count in found.items() if count == max(found.values())]
    if not best:
        raise WeightsError(
            f"checkpoint {path} has no weights of the config's backbone (it has "
            f"{listed(sorted(weights), most=3)}): name the config that it was trained with, or convert it "
            "with tools/convert.py"
        )
    backbones = [prefix for prefix in best if prefix.endswith("backbone.")]
    if len(best) > 1 and len(backbones) != 1:
        raise WeightsError(f"checkpoint {path} has several networks that fit: {listed(best, most=3)}")
    return (backbones or best)[0]


def _digest(model: nn.Module, config: Mapping[str, Any], preprocessor: nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    scale = {name: getattr(preprocessor, name, None) for name in ("mean", "std")}
    scale = {name: None if one is None else one.flatten().tolist() for name, one in scale.items()}
    return digest([found.hexdigest(), config, scale, swaps_channels(preprocessor)])
