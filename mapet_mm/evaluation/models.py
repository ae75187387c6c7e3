"""A config and a checkpoint made into a backbone that gives features."""

from __future__ import annotations

import hashlib
import json
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

from mapet_mm.engine.runners.launch import read_config
from mapet_mm.engine.runners.resume import check_pretrained, require_checkpoint
from mapet_mm.evaluation.adapters import TokenBackbone, runs_a_neck
from mapet_mm.evaluation.image_features import swaps_channels
from mapet_mm.interop.initial_weights import DECODERS
from mapet_mm.registry import MODELS
from mapet_mm.utils.config import plain, scope_of
from mapet_mm.utils.errors import UserError, listed
from mapet_mm.weight_files import KEYS, read_weights

# What else a checkpoint may hold beside a backbone, and features do not need: of a pre-training, a
# classifier, a distillation, or a model of images and texts.
OTHER_PARTS = (
    *DECODERS,
    *("neck.", "target_generator.", "data_preprocessor.", "teacher.", "momentum"),
    *("lm_head.", "regressor.", "projector.", "predictor."),
    *("head_dist.", "cls_classifier.", "distillation_classifier."),
    *("text_model.", "text_projection.", "visual_projection.", "logit_scale."),
)
# Of the outputs: features of the numbered layers have none, and the config says whether "output" has one.
FINAL_NORM = re.compile(r"(ln|norm|fc_norm|layernorm|layer_norm)\d*")
# Float tables that some versions of a model save, and others compute.
COMPUTED = ("attn_mask", "relative_coords_table")


class KeysError(UserError):
    """A checkpoint whose keys are not those of the config's backbone."""


@dataclass(frozen=True)
class Checkpoint:
    """A backbone with its weights.

    Args:
        name: as the table calls it.
        config: the model's config.
        backbone: gives the tokens.
        digest: of the weights, the architecture and the normalisation of images.
    """

    name: str
    config: Config
    backbone: TokenBackbone
    digest: str


def load_checkpoint(
    config: str | Config, checkpoint: str | None, trust: bool = False, name: str | None = None
) -> Checkpoint:
    """Build a config's model, load the weights of its backbone and put it on the device.

    Args:
        config: of a pre-training, a classifier or a bare backbone.
        checkpoint: what a training wrote, or weights of timm or Hugging Face for a wrapper of theirs; None
            for the weights that the config itself names by `load_from` or `init_cfg`, or random ones.
        trust: load it whatever it holds, which can run code of its own.
        name: the config's, with the checkpoint's, by default.

    Raises:
        UserError: a file that cannot be read, or keys that do not match.
    """
    cfg = read_config(config) if isinstance(config, str) else config
    if not cfg.get("model"):
        raise UserError(f"config {cfg.filename} has no `model`")
    init_default_scope(scope_of(cfg))
    model_config = {**cfg.model}
    preprocessor = model_config.get("data_preprocessor") or cfg.get("data_preprocessor")
    if preprocessor is None:
        raise UserError(
            f"config {cfg.filename} has no `data_preprocessor`: say with which `mean` and `std` images go in"
        )
    checkpoint = checkpoint or cfg.get("load_from") or None
    if checkpoint is None:
        check_pretrained(cfg, trust)
    if "target_generator" in model_config:
        model_config["target_generator"] = None  # features need no targets
    if checkpoint is not None and isinstance(backbone := model_config.get("backbone"), Mapping):
        model_config["backbone"] = {**backbone, "init_cfg": None}
    torch.manual_seed((cfg.get("randomness") or {}).get("seed") or 0)  # of random weights
    model = MODELS.build(model_config)
    missing: list[str] = []
    if checkpoint is None:
        model.init_weights()
    else:
        missing = load_weights(model, checkpoint, trust)
    model.eval()  # MMPretrain's backbones return None
    model.to(get_device())
    preprocessor = MODELS.build({"type": "mmpretrain.ClsDataPreprocessor", **preprocessor}).to(get_device())
    title = name or Path(cfg.filename or "model").stem + (f", {Path(checkpoint).stem}" if checkpoint else "")
    backbone = TokenBackbone(model, preprocessor, missing)
    return Checkpoint(title, cfg, backbone, _digest(model, model_config, preprocessor))


def load_weights(model: nn.Module, path: str, trust: bool = False) -> list[str]:
    """Load a checkpoint's weights into a model.

    Returns:
        The backbone's weights that the checkpoint does not have in their shape. They are set to NaN:
        `TokenBackbone` refuses them if features depend on them.

    Raises:
        KeysError: none of the backbone's weights are there; or weights that it lacks, and features need.
    """
    weights = _renamed(_read(path, trust), list(model.state_dict()))
    prefix = "backbone." if hasattr(model, "backbone") else ""
    if not any(name.startswith(prefix) for name in model.state_dict().keys() & weights.keys()):
        raise KeysError(
            f"checkpoint {path} has no weights of the config's backbone (its keys: "
            f"{listed(sorted(weights), most=3)}): name the config that it was trained with, or convert it "
            "with tools/convert.py"
        )
    try:
        keys = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        for name in re.findall(r"size mismatch for (\S+):", str(error)):
            del weights[name]
        keys = model.load_state_dict(weights, strict=False)
    unexpected = [name for name in keys.unexpected_keys if name.startswith(prefix)]
    if deeper := [name for name in unexpected if _is_deeper(model, name)]:
        raise KeysError(
            f"checkpoint {path} has {listed(sorted(deeper), most=3)}, and the config's backbone is of "
            "another depth: name the config that it was trained with"
        )
    if lacking := [name for name in unexpected if not _is_dispensable(model, name, weights)]:
        raise KeysError(
            f"checkpoint {path} has {listed(sorted(lacking), most=3)}, which the config's backbone lacks, so "
            "its features would be others: name the config that it was trained with"
        )
    missing = [name for name in keys.missing_keys if name.startswith(prefix)]
    state = model.state_dict()
    for name in missing:
        if state[name].is_floating_point():
            state[name].fill_(float("nan"))  # features that depend on it show it
    return missing


def _read(path: str, trust: bool) -> dict[str, Tensor]:
    """The state dict in a file, with its metadata where it has any."""
    folder = Path(path).is_dir()
    if folder or not path.endswith(".safetensors"):
        require_checkpoint("checkpoint", path, trust)
    if folder or path.endswith(".safetensors"):
        return read_weights(path)
    content = CheckpointLoader.load_checkpoint(path, map_location="cpu")
    for key in KEYS:
        if isinstance(content.get(key), dict):
            content = content[key]
    return content


def _renamed(weights: Mapping[str, Tensor], own: Sequence[str]) -> dict[str, Tensor]:
    """Weights with a prefix more or less, where most names are the model's own then: of a backbone alone."""
    votes = Counter({("", ""): sum(name in weights for name in own)})
    for name, others, side in [*((n, weights, 0) for n in own), *((n, set(own), 1) for n in weights)]:
        parts = name.split(".")
        for cut in range(1, len(parts)):
            if ".".join(parts[cut:]) in others:
                prefix = ".".join(parts[:cut]) + "."
                votes[(prefix, "") if side == 0 else ("", prefix)] += 1
    (more, less), _ = votes.most_common(1)[0]
    if not more and not less:
        return weights
    return {more + name.removeprefix(less): value for name, value in weights.items() if name.startswith(less)}


def _is_deeper(model: nn.Module, name: str) -> bool:
    """Whether a weight belongs to a member that a list of the model's modules has not."""
    modules, parts = dict(model.named_modules()), name.split(".")
    for cut, part in enumerate(parts):
        parent = modules.get(".".join(parts[:cut]))
        if isinstance(parent, nn.ModuleList | nn.Sequential) and part.isdigit() and int(part) >= len(parent):
            return True
    return False


def _is_dispensable(model: nn.Module, name: str, weights: Mapping[str, Tensor]) -> bool:
    """Whether features are the same without a weight that only the checkpoint has."""
    parts = name.split(".")
    # A model that renames what it loads, as BEiT's, has learned weights alone under other names.
    is_learned = name not in weights or weights[name].is_floating_point()
    if not is_learned or parts[-1] in COMPUTED:
        return True
    layer = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts))
    if any(f"{part}.".startswith(OTHER_PARTS) for part in parts[:layer]):
        return True
    *above, norm, _ = ["", *parts]
    beside = dict(model.named_modules()).get(".".join(above[1:]), nn.Identity()).children()
    has_layers = any(isinstance(module, nn.ModuleList | nn.Sequential) for module in beside)
    return has_layers and FINAL_NORM.fullmatch(norm) is not None


def _digest(model: nn.Module, config: Mapping[str, Any], preprocessor: nn.Module) -> str:
    backbone = {**config.get("backbone", config), "init_cfg": None}  # weights count, not where they are from
    architecture = {"type": config["type"], "backbone": backbone}
    normalisation = [getattr(preprocessor, name, None) for name in ("mean", "std")]
    known = [plain(architecture), *(None if one is None else one.flatten().tolist() for one in normalisation)]
    known.append(swaps_channels(preprocessor))
    if runs_a_neck(model):
        known.append("backbone alone")  # features of earlier versions were those behind the neck
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode())
    for name, value in sorted(getattr(model, "backbone", model).state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
