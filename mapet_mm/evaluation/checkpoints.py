"""A config's backbone with the weights of a checkpoint, and what any model is once it has its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.model import PretrainedInit
from mmengine.registry import WEIGHT_INITIALIZERS, init_default_scope
from torch import nn

from mapet_mm.evaluation.tokens import TokenBackbone, network_of, swaps_channels
from mapet_mm.evaluation.weights import WeightsError, load_weights
from mapet_mm.models import MaPeT, MaPeTPretrainViT
from mapet_mm.models.backbones.timm_weights import read_source
from mapet_mm.registry import MODELS
from mapet_mm.utils.config import class_of, pretrained_entries, read_config, scope_of, type_name
from mapet_mm.utils.errors import UserError, reason_of
from mapet_mm.utils.identity import digest
from mapet_mm.weight_files import only_safe_globals

RANDOM = "random weights"
# Options of the two streams, which a plain ViT does not have.
TWO_STREAM_OPTIONS = ("cutting_point", "objective", "recompute")


@dataclass(frozen=True)
class Model:
    """A backbone with its weights.

    Args:
        name: its column in the table.
        backbone: gives the tokens.
        config: says how it takes images, by `test_dataloader` or a section `evaluation`.
        digest: of the weights, the architecture and the normalisation of images.
        missing: weights that the checkpoint lacks. They are NaN, so features that need them show it.
        is_random: True if nobody has trained the weights.
    """

    name: str
    backbone: TokenBackbone
    config: Config
    digest: str
    missing: tuple[str, ...] = ()
    is_random: bool = False


def load_checkpoint(
    config: str | Config, checkpoint: str | None, prefix: str | None = None, random: bool = False
) -> Model:
    """Build the backbone of a config's model, load its weights and put it on the device.

    Args:
        config: of a pre-training, a classifier, a segmentor or a bare backbone.
        checkpoint: what a training wrote, or weights of timm or Hugging Face for a wrapper of theirs; None
            for the weights that the config names by `load_from` or `init_cfg`, or random ones.
        prefix: of the backbone's names in the checkpoint; None looks for the usual ones.
        random: take random weights of seed 0, whatever the config names.

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
    backbone = without_weights(backbone_of(settings))
    weights = None
    seed = 0
    if random:
        backbone = without_weights(backbone, own=True)
    else:
        weights = checkpoint or cfg.get("load_from") or named_weights(settings)
        seed = (cfg.get("randomness") or {}).get("seed") or 0
    torch.manual_seed(seed)  # of random weights
    try:
        # A wrapper of timm or Hugging Face may load weights: only what the files here may hold.
        with only_safe_globals():
            model = MODELS.build(backbone)
    except (OSError, UnpicklingError) as error:
        raise WeightsError(f"the weights of the config's backbone: {reason_of(error)}") from error
    _check_state(network_of(model))
    missing = []
    if weights:
        missing = load_weights(network_of(model), weights, prefix)
    elif hasattr(model, "init_weights"):
        model.init_weights()
    title = Path(cfg.filename or "model").stem
    if checkpoint:
        title += f", {Path(checkpoint).stem}"
    is_random = not weights and without_weights(backbone, own=True) == backbone
    title = RANDOM if random else title
    architecture = {**backbone, "init_cfg": None}
    return model_of(title, model, cfg, preprocessor, architecture, missing, is_random)


def model_of(
    title: str,
    model: nn.Module,
    config: Config,
    preprocessor: Mapping[str, Any],
    architecture: Mapping[str, Any],
    missing: Sequence[str] = (),
    is_random: bool = False,
) -> Model:
    """A model with its weights, on the device.

    Args:
        title: its name in tables.
        model: as for `TokenBackbone`.
        config: says how it takes images.
        preprocessor: config with mean and standard deviation.
        architecture: all else that its features depend on, for the digest.
        missing: names of weights that are NaN.
        is_random: True if nobody has trained the weights.
    """
    model.eval()  # MMPretrain's backbones return None
    # In float32 also where a library loads a file of half precision in its own type: transformers 5 does.
    model.to(get_device(), torch.float32)
    num_bands = [len(preprocessor.get(name) or ()) for name in ("mean", "std")]
    if num_bands[0] != num_bands[1] and 1 not in num_bands:
        raise UserError(
            f"{title}: a mean of {num_bands[0]} bands and a standard deviation of {num_bands[1]}: --mean and "
            "--std take a value for each band"
        )
    preprocessor = MODELS.build({"type": "mmpretrain.ClsDataPreprocessor", **preprocessor}).to(get_device())

    weights = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        weights.update(name.encode())
        weights.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    scale = {}
    for name in ("mean", "std"):
        values = getattr(preprocessor, name, None)
        scale[name] = None if values is None else values.flatten().tolist()
    identity = digest([weights.hexdigest(), architecture, scale, swaps_channels(preprocessor)])
    return Model(title, TokenBackbone(model, preprocessor), config, identity, tuple(missing), is_random)


def backbone_of(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of a model's backbone; of a MaPeT pre-training the plain ViT with the same weights."""
    backbone = model.get("backbone", model)
    algorithm = class_of(model["type"], MODELS)
    pretrained_vit = class_of(backbone["type"], MODELS)
    if not (isinstance(algorithm, type) and issubclass(algorithm, MaPeT)):
        return backbone
    if not (isinstance(pretrained_vit, type) and issubclass(pretrained_vit, MaPeTPretrainViT)):
        return backbone  # another library's ViT, whose own forward pass is read
    plain = {name: value for name, value in backbone.items() if name not in TWO_STREAM_OPTIONS}
    return {**plain, "type": "mapet_mm.MaPeTViT", "out_type": "raw"}


def _check_state(network: nn.Module) -> None:
    """Raise UserError for a network that hides weights, so that nobody could say whether they are loaded."""
    hidden = dict(network.named_parameters()).keys() - network.state_dict().keys()
    if hidden:
        raise WeightsError(
            f"{type(network).__name__} keeps {len(hidden)} weights out of its state dict, such as "
            f"`{min(hidden)}`: evaluate the network into which they are merged (of LoRA: MMPretrain's "
            "tools/model_converters/merge_lora_weight.py)"
        )


def named_weights(model: Mapping[str, Any]) -> str | None:
    """The file that the `init_cfg` of a model or of its backbone names, or MMSegmentation's `pretrained`.

    Raises:
        UserError: the config leaves the file open, or names weights of a part of the backbone.
    """
    for key, init_cfg in pretrained_entries(model, "model"):
        if not key.startswith(("model.init_cfg", "model.backbone.init_cfg")):
            continue
        if not init_cfg["checkpoint"]:
            raise UserError(f"the config leaves `{key}.checkpoint` open: name the checkpoint")
        return init_cfg["checkpoint"]
    backbone = model.get("backbone", model)
    for part in (model, backbone):
        if isinstance(part.get("pretrained"), str):
            return part["pretrained"]
    for key, _ in pretrained_entries(backbone, "model.backbone"):
        raise UserError(
            f"the config names weights of a part of its backbone, by `{key}`: name a checkpoint of the whole "
            "backbone as second argument"
        )
    return None


def without_weights(config: Any, own: bool = False) -> Any:
    """A copy of a config of a backbone which loads no file while that is built.

    MMEngine would unpickle what the file holds, and go on with random weights where the names do not fit.

    Args:
        config: or a part of it.
        own: also no weights of a library's own, `pretrained=True`; a RUN or folder that a `TIMMViT` names
            becomes the network in it.
    """
    if isinstance(config, list | tuple):
        return [without_weights(value, own) for value in config if not loads_file(value)]
    if not isinstance(config, Mapping):
        return config
    kept = {}
    for name, value in config.items():
        names_file = loads_file(value) or (name == "pretrained" and isinstance(value, str))
        is_own = name == "checkpoint_path" or (name == "pretrained" and value is True)
        if not names_file and not (own and is_own):
            kept[name] = without_weights(value, own)
    if own and type_name(config.get("type", "")) == "TIMMViT":
        network, _ = read_source(config["model_name"])
        kept = {**network, **kept, "model_name": network["model_name"]}
    return kept


def loads_file(value: Any) -> bool:
    """True for MMEngine's `dict(type="Pretrained", checkpoint=...)`."""
    if not isinstance(value, Mapping) or "checkpoint" not in value:
        return False
    return class_of(value.get("type"), WEIGHT_INITIALIZERS) is PretrainedInit
