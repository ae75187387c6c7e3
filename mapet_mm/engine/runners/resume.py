"""The checkpoint that a run starts from: safe to read, with weights that are the model's."""

import os
import pickle
import re
import shlex
import zipfile
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.model import BaseModule
from mmengine.runner.checkpoint import get_external_models, get_torchvision_models
from torch import nn
from torch.serialization import get_unsafe_globals_in_checkpoint

from mapet_mm.interop.released import SCHEME, released_weights
from mapet_mm.models.backbones.checkpoint_hooks import remedy_for
from mapet_mm.utils.config import nodes, pretrained_entries, type_name
from mapet_mm.utils.errors import LaunchError, UserError, listed
from mapet_mm.weight_files import WeightFileError, fetch, only_safe_globals, without_wrapper, without_wrappers

# MMEngine's names of models and the tables of their addresses.
MODEL_ZOOS = {
    "torchvision": get_torchvision_models,
    "open-mmlab": get_external_models,
    "openmmlab": get_external_models,
}


class BrokenCheckpointError(LaunchError):
    """A checkpoint is missing, truncated, or of another format."""


def require_checkpoint(what: str, path: str, trust: bool = False) -> str:
    """The local file of a checkpoint, which can be loaded without running code that it may hold.

    MMEngine runs what a file holds where reading it safely fails, and always at an address. So an https://
    address, or a name of torchvision's or OpenMMLab's models, is fetched first and then read like any file.

    Args:
        what: names the file in the message.
        path: a file, an https:// address, or `mapet://`, `torchvision://` or `open-mmlab://` with a name.
        trust: read it whatever it holds.

    Raises:
        LaunchError: it cannot be read, or not without running code.
    """
    if path.startswith(SCHEME):
        released_weights(path)
        return path
    scheme, _, name = path.partition("://")
    if scheme in MODEL_ZOOS:
        path = MODEL_ZOOS[scheme]().get(name, path)
    try:
        file = local_file(path, trust)
        if file is None:
            return path
        read(file, trust)
    except WeightFileError as error:
        raise LaunchError(f"{what} {error}") from None
    except LaunchError as error:
        raise type(error)(f"{what} {error}") from None
    return str(file) if "://" in path else path


def local_file(path: str, trust: bool) -> Path | None:
    """The file at a path or an address; None if MMEngine has to fetch it, and it is trusted."""
    scheme = path.partition("://")[0] if "://" in path else ""
    if not scheme:
        return Path(path).expanduser()
    if scheme in ("http", "https"):
        return fetch(path)
    if trust:
        return None
    raise LaunchError(
        f"{path} is read by MMEngine, which can run code that it holds: download it, or if you trust it, add "
        "--trust-checkpoint"
    )


def read(path: Path, trust: bool = False) -> Any:
    """A checkpoint's content, its tensors still in the file.

    Raises:
        BrokenCheckpointError: it cannot be read.
        LaunchError: it holds Python objects, and is not trusted.
    """
    if not path.exists():
        raise BrokenCheckpointError(f"{path} does not exist")
    zipped = zipfile.is_zipfile(path)
    with only_safe_globals():
        try:
            unsafe = get_unsafe_globals_in_checkpoint(path) if zipped and not trust else []
            content = None if unsafe else torch.load(path, "cpu", weights_only=not trust, mmap=zipped)
        except (RuntimeError, EOFError, ValueError, KeyError, OSError, pickle.UnpicklingError) as error:
            raise BrokenCheckpointError(
                f"{path} is truncated, or no checkpoint of PyTorch ({type(error).__name__}); "
                f"`mapet-mm convert mm mm {shlex.quote(str(path))} weights.pth` makes one of safetensors"
            ) from error
    if unsafe:
        raise LaunchError(
            f"{path} holds Python objects ({listed(sorted(unsafe), most=3)}), which can run code when it is "
            "read: if you trust it, add --trust-checkpoint"
        )
    return content


def check_weights(model: nn.Module, checkpoint: dict) -> None:
    """Take the names of PyTorch's wrappers from a checkpoint's weights, in place, unless the model has some.

    Raises:
        UserError: no weight has then the name of one of the model's.
    """
    weights = checkpoint.get("state_dict", checkpoint)
    names = [name.removeprefix("module.") for name in model.state_dict()]  # of test-time augmentation
    if names == [without_wrapper(name) for name in names]:
        renamed = without_wrappers(weights)
        weights.clear()
        weights.update(renamed)
    if set(names).isdisjoint(weights):
        remedy = remedy_for(weights, "`mapet-mm convert` renames timm's and Hugging Face's")
        raise UserError(
            f"no weight of the checkpoint has a name of the model's: it has {listed([*weights], 3)}, "
            f"the model {listed(names, 3)}; {remedy}"
        )


def check_start_names(model: nn.Module, trust: bool = False) -> None:
    """Check that each `init_cfg=dict(type="Pretrained")` has a weight of the part that it is for.

    MMEngine would only log the names, and train from random weights. Parts of this package say so themselves,
    because they adapt names; so may those of other libraries that have an `init_weights` of their own.

    Raises:
        LaunchError: none of the file's weights has the name of one of the part's.
    """
    for path, part in model.named_modules():
        kind = type(part)
        library = kind.__module__.partition(".")[0]
        initialise = getattr(kind, "init_weights", None)
        is_loaded_as_it_is = library == "mmpretrain" or initialise is BaseModule.init_weights
        if library == "mapet_mm" or not is_loaded_as_it_is:
            continue
        for _, init_cfg in pretrained_entries(getattr(part, "init_cfg", None)):
            own = [without_wrapper(name) for name in part.state_dict()]
            file, saved = _saved_names(init_cfg, trust)
            prefix = _prefix_of(init_cfg)
            names = [without_wrapper(name[len(prefix) :]) for name in saved if name.startswith(prefix)]
            if saved and set(own).isdisjoint(names):
                remedy = remedy_for(names, "`mapet-mm convert` renames timm's and Hugging Face's")
                raise LaunchError(
                    f"{file} has no weight of the model's `{path}`: it has {listed(names, 3)}, the "
                    f"{kind.__name__} {listed(own, 3)}; {remedy}"
                )


def check_pretrained(cfg: Config, trust: bool = False) -> None:
    """Check that each `init_cfg=dict(type="Pretrained")` names a file, unless `load_from` brings the weights.

    MMSegmentation's and MMDetection's models also take `pretrained=FILE`, of the whole or of its backbone.

    Raises:
        LaunchError: one leaves it open, the file is not there, or MMPretrain's `TIMMBackbone` would load
            nothing of it.
    """
    for key, part in (("model", cfg.model), ("model.backbone", cfg.model.get("backbone") or {})):
        source = part.get("pretrained")
        if isinstance(source, str) and ("://" in source or os.path.isfile(source)):
            part["pretrained"] = require_checkpoint(f"`{key}.pretrained`", source, trust)
    for key, init_cfg in list(pretrained_entries(cfg.model, "model")):
        if init_cfg.checkpoint:
            init_cfg["checkpoint"] = require_checkpoint(f"`{key}.checkpoint`", init_cfg.checkpoint, trust)
            _find_prefix(key, init_cfg, trust)
        elif cfg.get("load_from"):
            cfg.merge_from_dict({key: None})
        else:
            raise LaunchError(
                f"the config leaves `{key}.checkpoint` open: --cfg-options {key}.checkpoint=CHECKPOINT, "
                f"or {key}=None to start from random weights"
            )
    for key, backbone in nodes(cfg.model, "model"):
        if isinstance(backbone, dict) and type_name(backbone.get("type", "")) == "TIMMBackbone":
            _check_timm_backbone(key, backbone, trust)


def _check_timm_backbone(key: str, backbone: dict, trust: bool) -> None:
    """Raise LaunchError where MMPretrain's `TIMMBackbone` could not take a ViT's weights.

    With `features_only`, which it needs for maps, its weights have other names than a pre-training's, and
    timm cannot load a `checkpoint_path`.
    """
    remedy = 'take type="mapet_mm.TIMMViT" with the same entries, or with a RUN as `model_name`'
    has_maps = backbone.get("features_only", False)
    file = backbone.get("checkpoint_path")
    if file and (has_maps or Path(file).with_name("config.json").is_file()):
        raise LaunchError(f"`{key}`: timm's models do not take `checkpoint_path` {file} like this: {remedy}")
    own_names = "timm_model.model." if has_maps else "timm_model."
    for entry_key, init_cfg in pretrained_entries(backbone.get("init_cfg"), f"{key}.init_cfg"):
        file, saved = _saved_names(init_cfg, trust)
        names = [name.removeprefix(_prefix_of(init_cfg)) for name in saved]
        is_of_vit = any(name.startswith(("blocks.", "timm_model.blocks.")) for name in names)
        if is_of_vit and not any(name.startswith(own_names) for name in names):
            raise LaunchError(f"`{entry_key}` would load nothing of {file} into TIMMBackbone: {remedy}")


def _saved_names(init_cfg: dict[str, Any], trust: bool) -> tuple[Path, list[str]]:
    """The file of an `init_cfg`, and the names of the weights in it; none if it is no local file."""
    file = Path(init_cfg["checkpoint"]).expanduser()
    content = read(file, trust) if file.is_file() else {}
    return file, list(content.get("state_dict", content))


def _prefix_of(init_cfg: dict[str, Any]) -> str:
    """The prefix of an `init_cfg` with its dot; empty if there is none."""
    prefix = init_cfg.get("prefix") or ""
    return prefix and prefix.removesuffix(".") + "."


def _find_prefix(key: str, init_cfg: dict[str, Any], trust: bool) -> None:
    """Let `init_cfg.prefix` name the weights inside PyTorch's wrappers, too; MMEngine takes it as it stands.

    Raises:
        LaunchError: the file has nothing under the prefix.
    """
    file, names = _saved_names(init_cfg, trust)
    if not names:
        return
    asked = _prefix_of(init_cfg)
    prefixes = set()  # of all lengths, each with its last dot
    for name in names:
        for dot in re.finditer(r"\.", name):
            prefixes.add(name[: dot.end()])
    found = [prefix for prefix in prefixes if without_wrapper(prefix) == without_wrapper(asked)]
    # `backbone._orig_mod.` rather than `backbone.`, which is before it; of two parts neither.
    inner = max(found, key=len, default=asked)
    if inner != asked and all(inner.startswith(prefix) for prefix in found):
        init_cfg["prefix"] = inner
    if found or not asked:
        return
    others = sorted(prefix for prefix in prefixes if prefix.endswith(f".{asked}"))
    there = f"{listed(names, most=3)}: --cfg-options {key}.prefix=PREFIX, or None to take all"
    if others:
        there = f"under {listed(others, most=4)}: --cfg-options {key}.prefix={others[0]}"
    raise LaunchError(f"`{key}`: {file} has nothing under `{asked}`, but {there}")


def find_checkpoint(cfg: Config) -> str | None:
    """The last checkpoint in the run's own folder, or None before the first.

    MMEngine writes down its path in `last_checkpoint`, and `PortableCheckpointHook` has it write whole files.
    A run that was copied or moved takes the file of that name in its own folder.

    Raises:
        LaunchError: the record is empty, as a full disk leaves it.
    """
    work_dir = Path(cfg.work_dir)
    record = work_dir / "last_checkpoint"
    if not record.is_file():
        return None
    name = Path(record.read_text().strip()).name
    if not name:
        raise LaunchError(
            f"{record} is empty: name a checkpoint by --resume, or remove it to train from the beginning"
        )
    hook = (cfg.get("default_hooks") or {}).get("checkpoint") or {}
    out_dir = hook.get("out_dir")
    folder = Path(out_dir, work_dir.name) if out_dir else work_dir  # as MMEngine's CheckpointHook has it
    return str(folder / name)
