"""Models by name: of timm, Hugging Face and torchvision, what `mapet-mm convert` wrote, and released ones.

Architecture, normalisation, size and resizing are the model's own, as its library states them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmengine.config import Config
from torch import nn

from mapet_mm.evaluation.adapters import torchvision_layers
from mapet_mm.evaluation.models import (
    OTHER_PARTS,
    Checkpoint,
    WeightsError,
    checkpoint_of,
    load_checkpoint,
    load_weights,
)
from mapet_mm.interop.convert import CLASS_TOKEN, FINAL_NORM, as_start, sizes_of
from mapet_mm.interop.description import INTERPOLATIONS, Preparation, read_description
from mapet_mm.interop.released import SCHEME
from mapet_mm.models import MaPeTViT
from mapet_mm.utils.config import in_package, read_config
from mapet_mm.utils.dist import print_once
from mapet_mm.utils.errors import UserError, listed, reason_of
from mapet_mm.weight_files import read_checkpoint

CONFIGS = (".py", ".yml", ".yaml", ".json")


def load_model(
    name: str, checkpoint: str | None = None, options: Mapping[str, Any] | None = None, **changes: Any
) -> tuple[Config, Checkpoint]:
    """A model with its weights, and a config that says how it takes images.

    Args:
        name: a config; `timm:NAME`, with timm's own names such as `local-dir:FOLDER`; `hf:NAME_OR_FOLDER`;
            `torchvision:NAME`, or `NAME:WEIGHTS` for other weights than the default; a folder or file that
            tools/convert.py wrote; or `mapet://NAME`.
        checkpoint: weights to load instead of the library's.
        options: entries to change in a config.
        **changes: `mean`, `std` and `size` in place of the model's own, size a square's side.

    Raises:
        UserError: no such model, or weights that are not its.
    """
    library, _, rest = name.partition(":")
    if library not in LIBRARIES and Path(name).is_dir():
        known = Path(name, "config.json")
        content = known.read_text() if known.is_file() else ""
        library = "timm" if '"architecture"' in content else "hf"
        rest = f"local-dir:{name}" if library == "timm" else name
    if library in LIBRARIES:
        return _of_library(name, library, rest, checkpoint, changes)
    if not name.startswith(SCHEME) and not name.endswith(CONFIGS):
        return _described(name, changes)
    if changes.get("size"):
        raise UserError(f"--size: {name} is a config, which has its own: change it by --cfg-options")
    if name.startswith(SCHEME):
        config, checkpoint = _released(name), name
    else:
        config = read_config(in_package(name), options=options)
    known = config.get("model", {}).get("data_preprocessor") or config.get("data_preprocessor") or {}
    known.update({key: [255 * one for one in value] for key, value in changes.items() if value})
    loaded = load_checkpoint(config, checkpoint)
    scale = f"mean {known.get('mean')}, std {known.get('std')}"
    print_once(f"{loaded.name}: images by the config's pipeline, {scale}")
    return config, loaded


def _of_library(
    name: str, library: str, rest: str, checkpoint: str | None, changes: Mapping[str, Any]
) -> tuple[Config, Checkpoint]:
    try:
        network, prepared = LIBRARIES[library](rest, checkpoint is None, changes.get("size"))
    except (OSError, RuntimeError, ValueError, KeyError, ImportError) as error:
        remedy = "" if checkpoint else "; with a checkpoint as second argument no weights are fetched"
        raise UserError(f"{name}: {reason_of(error)}{remedy}") from error
    missing = load_weights(network, checkpoint) if checkpoint else []
    network = torchvision_layers(network) if library == "torchvision" else network
    folder = Path(rest.removeprefix("local-dir:"))
    files = [file.read_text() for file in sorted(folder.glob("config.json"))] if folder.is_dir() else []
    title = name + (f", {Path(checkpoint).stem}" if checkpoint else "")
    return _prepared(title, network, prepared, changes, [name, files], missing)


def _prepared(
    title: str,
    network: nn.Module,
    prepared: Preparation,
    changes: Mapping[str, Any],
    architecture: Any,
    missing: Sequence[str] = (),
) -> tuple[Config, Checkpoint]:
    """A network with its weights, and a config with its normalisation and pipeline."""
    given = {name: tuple(changes[name]) for name in ("mean", "std") if changes.get(name)}
    if side := changes.get("size"):  # resized in proportion
        given["img_size"], by = (side, side), side / min(prepared.img_size)
        given["resize"] = prepared.resize and round(prepared.resize * by)
    prepared = replace(prepared, **given)
    mean, std = ([255 * value for value in values] for values in (prepared.mean, prepared.std))
    config = Config(
        dict(
            default_scope="mmpretrain",
            data_preprocessor=dict(mean=mean, std=std, to_rgb=True),
            test_dataloader=dict(dataset=dict(pipeline=prepared.pipeline)),
        )
    )
    architecture = dict(architecture=architecture, size=prepared.img_size)
    loaded = checkpoint_of(title, network, config.data_preprocessor, architecture, missing)
    print_once(f"{title}: {prepared}")
    return config, loaded


def _timm(name: str, with_weights: bool, side: int | None) -> tuple[nn.Module, Preparation]:
    """A model of timm, and what its `pretrained_cfg` says."""
    import timm

    model = timm.create_model(name, pretrained=with_weights)
    if side and hasattr(model, "set_input_size"):  # position embeddings of one size
        model.set_input_size(img_size=side)
    known = timm.data.resolve_model_data_config(model)
    resize, crop = timm.data.create_transform(**known).transforms[:2]
    short, size, scale = getattr(resize, "size", 0), tuple(crop.size), (known["mean"], known["std"])
    if type(resize).__name__ != "Resize" or not (isinstance(short, int) or tuple(short) == size):
        raise ValueError(f"images are prepared by {resize} and {crop}, which is not supported")
    short = short if isinstance(short, int) else None
    return model, Preparation(size, *map(tuple, scale), short, known["interpolation"])


def _hugging_face(name: str, with_weights: bool, side: int | None) -> tuple[nn.Module, Preparation]:
    """A model of Hugging Face, and what its image processor says."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(name)
    if with_weights:
        model, found = transformers.AutoModel.from_pretrained(name, output_loading_info=True)
        if lost := [one for one in found["missing_keys"] if not OTHER_PARTS.match(one)]:
            raise WeightsError(f"{name} lacks {listed(sorted(lost), most=3)} of {type(model).__name__}")
    else:
        model = transformers.AutoModel.from_config(config)
    model = getattr(model, "vision_model", model)
    known = transformers.AutoImageProcessor.from_pretrained(name).to_dict()
    crop = known.get("crop_size") if known.get("do_center_crop") else known["size"]
    whole = model.config.image_size
    size = (crop["height"], crop["width"]) if "height" in crop else (whole, whole)
    numbers = {number: kind for kind, number in INTERPOLATIONS.items()}
    scale = known["image_mean"], known["image_std"]
    scale = scale if known.get("do_normalize", True) else ((0.0,) * 3, (1.0,) * 3)
    short, kind = known["size"].get("shortest_edge"), numbers[int(known["resample"])]
    return model, Preparation(size, *map(tuple, scale), short, kind)


def _torchvision(name: str, with_weights: bool, side: int | None) -> tuple[nn.Module, Preparation]:
    """A model of torchvision with its layers as outputs, and what its weights' transforms say."""
    from torchvision import models

    name, _, tag = name.partition(":")
    weights = models.get_model_weights(name)[tag or "DEFAULT"]
    options = {"image_size": side} if side and name.startswith("vit") else {}
    model = models.get_model(name, weights=weights if with_weights else None, **options)
    known = weights.transforms()
    (crop,), (resize,) = known.crop_size, known.resize_size
    scale = tuple(known.mean), tuple(known.std)
    return model, Preparation((crop, crop), *scale, resize, known.interpolation.value)


LIBRARIES = {"timm": _timm, "hf": _hugging_face, "torchvision": _torchvision}


def _released(name: str) -> Config:
    """The recipe of the authors' weights."""
    from mmpretrain.apis.model import ModelHub, list_models

    import mapet_mm.hub  # noqa: F401

    known = [ModelHub.get(each) for each in list_models(pattern="mapet*released*")]
    found = {each.weights: each.config for each in known}
    if name not in found:
        raise UserError(f"no weights {name}: there are {', '.join(sorted(found))}")
    return found[name]


def _described(path: str, changes: Mapping[str, Any]) -> tuple[Config, Checkpoint]:
    """The plain ViT that a file of weights describes."""
    if not Path(path).is_file():
        known = ", ".join(f"{library}:NAME" for library in LIBRARIES)
        raise UserError(f"{path}: no such config, folder or file of weights; by name: {known}, {SCHEME}NAME")
    weights, meta = read_checkpoint(path)
    try:
        known, (backbone, _) = read_description(meta), as_start(weights)
    except ValueError as error:
        raise UserError(f"{path}: {error}, or name its config first: CONFIG {path}") from error
    side = changes.get("size") or known.img_size
    options = dict(
        arch=dict(num_heads=known.num_heads, **sizes_of(backbone)),
        patch_size=known.patch_size,
        with_cls_token=CLASS_TOKEN in backbone,
        final_norm=FINAL_NORM in backbone,
        out_type="raw",
    )
    vit = MaPeTViT(img_size=side, **options)
    own = {name.removeprefix("backbone."): value for name, value in backbone.items()}
    vit.load_state_dict({name: value for name, value in own.items() if not name.startswith("ln2.")})
    return _prepared(path, vit, known, changes, options)
