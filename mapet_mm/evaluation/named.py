"""Models by name: of timm, Hugging Face and torchvision, what `mapet-mm convert` wrote, and released ones.

Architecture, normalisation, size and resizing are the model's own, as its library states them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from torch import nn

from mapet_mm.evaluation.adapters import torchvision_layers
from mapet_mm.evaluation.checkpoint_weights import load_weights
from mapet_mm.evaluation.image_sets import SECTION
from mapet_mm.evaluation.libraries import LIBRARIES, one_line
from mapet_mm.evaluation.models import RANDOM, Checkpoint, checkpoint_of, load_checkpoint
from mapet_mm.interop.convert import CLASS_TOKEN, FINAL_NORM, as_start, sizes_of
from mapet_mm.interop.description import Preparation, description_of, read_description
from mapet_mm.interop.like_start import images_of
from mapet_mm.interop.released import SCHEME
from mapet_mm.models import MaPeTViT
from mapet_mm.utils.config import in_package, read_config
from mapet_mm.utils.dist import print_once
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.identity import IDENTITY
from mapet_mm.utils.run_folder import EXPORTS, RUN_CONFIG, newest_checkpoint
from mapet_mm.weight_files import read_checkpoint

CONFIGS = (".py", ".yml", ".yaml", ".json")


def load_model(
    name: str,
    checkpoint: str | None = None,
    options: Mapping[str, Any] | None = None,
    prefix: str | None = None,
    random: bool = False,
    **changes: Any,
) -> tuple[Config, Checkpoint]:
    """A model with its weights, and a config that says how it takes images.

    Args:
        name: a config; the folder of a `mapet-mm pretrain`; `timm:NAME`, with timm's own names such as
            `local-dir:FOLDER`; `hf:NAME_OR_FOLDER`; `torchvision:NAME`, or `NAME:WEIGHTS` for other weights
            than the default; a folder or file that `mapet-mm convert` wrote; or `mapet://NAME`.
        checkpoint: weights to load instead of the library's.
        options: entries to change in a config.
        prefix: of the backbone's names in the checkpoint; None looks for the usual ones.
        random: take the same network with random weights of seed 0.
        **changes: `mean`, `std` and `size` in place of the model's own, size a square's side.

    Raises:
        UserError: no such model, or weights that are not its.
    """
    library, _, rest = name.partition(":")
    changes = {**changes, "random": random}
    if library in LIBRARIES:
        return _of_library(name, library, rest, checkpoint, prefix, changes)
    if Path(name).is_dir():
        _require_model(Path(name))
    if Path(name, RUN_CONFIG).is_file():
        checkpoint = checkpoint or str(newest_checkpoint(Path(name)))
        name = str(Path(name, RUN_CONFIG))
    if Path(name).is_dir():
        if _is_of_timm(Path(name)):
            return _of_library(name, "timm", f"local-dir:{name}", checkpoint, prefix, changes)
        return _of_library(name, "hf", name, checkpoint, prefix, changes)
    if name.startswith(SCHEME):
        return _of_config(name, _released(name), name, prefix, changes)
    if name.endswith(CONFIGS):
        return _of_config(name, read_config(in_package(name), options=options), checkpoint, prefix, changes)
    return _described(name, changes)


def random_twin(
    name: str, checkpoint: str | None, loaded: Checkpoint, options: Mapping[str, Any] | None, **changes: Any
) -> tuple[Config, Checkpoint] | None:
    """The network of `load_model` with random weights; None if its weights are random already."""
    if loaded.is_random:
        return None
    config, twin = load_model(name, checkpoint, options, random=True, **changes)
    # Of the weights of a config's seed, or of a network without weights.
    return None if twin.digest == loaded.digest else (config, twin)


def _require_model(folder: Path) -> None:
    """Raise UserError for a folder that is no model: of no library, or a part of a RUN."""
    if (folder / "config.json").is_file() or (folder / IDENTITY).is_file():
        return
    for run in reversed(folder.resolve().parents):  # MMEngine leaves a copy of the config in RUN/training
        if (run / RUN_CONFIG).is_file():
            raise UserError(f"{folder} is a part of the RUN {run}: name that")
    if (folder / RUN_CONFIG).is_file():
        return
    raise UserError(
        f"{folder}: a folder without config.json (of timm or Hugging Face) or {RUN_CONFIG} (of `mapet-mm "
        "pretrain`)"
    )


def _is_of_timm(folder: Path) -> bool:
    """True for a folder that timm wrote; False for one of Hugging Face."""
    return '"architecture"' in (folder / "config.json").read_text()


def _of_config(
    name: str, config: Config, checkpoint: str | None, prefix: str | None, changes: Mapping[str, Any]
) -> tuple[Config, Checkpoint]:
    """The backbone of a config's model, which takes images by the config's pipeline."""
    if changes.get("size"):
        raise UserError(f"--size: {name} is a config, which has its own: change it by --cfg-options")
    known = config.get("model", {}).get("data_preprocessor") or config.get("data_preprocessor") or {}
    for key in ("mean", "std"):
        if changes.get(key):
            known[key] = [255 * value for value in changes[key]]
    loaded = load_checkpoint(config, checkpoint, prefix, changes.get("random", False))
    description = _add_test_images(config)
    prepared = f"images by the config's pipeline, mean {known.get('mean')}, std {known.get('std')}"
    print_once(f"{loaded.name}: {description or prepared}")
    return config, loaded


def _add_test_images(config: Config) -> Preparation | None:
    """Give a pre-training's config the pipeline of a test, resized as in training, unless it has one."""
    if any(config.get(key) for key in (SECTION, "knn_probe", "test_dataloader")):
        return None
    try:
        # A continued ViT takes its images as its start does.
        description = images_of(config[EXPORTS]) if config.get(EXPORTS) else description_of(config)
    except ValueError:  # `read_image_sets` says what is missing if it needs a pipeline
        return None
    config.test_dataloader = dict(dataset=dict(pipeline=description.pipeline))
    return description


def _of_library(
    name: str,
    library: str,
    rest: str,
    checkpoint: str | None,
    prefix: str | None,
    changes: Mapping[str, Any],
) -> tuple[Config, Checkpoint]:
    """A model of timm, Hugging Face or torchvision."""
    random = changes.get("random", False)
    if random:
        checkpoint = None
        torch.manual_seed(0)
    with_weights = checkpoint is None and not random
    remedy = "with a checkpoint as second argument no weights are fetched" if with_weights else ""
    with one_line(name, remedy):
        network, prepared, missing = LIBRARIES[library](rest, with_weights, changes.get("size"))
    title = RANDOM if random else name
    if checkpoint:
        missing = load_weights(network, checkpoint, prefix)
        title += f", {Path(checkpoint).stem}"
    if library == "torchvision":
        network = torchvision_layers(network)
    # Of a folder, the architecture is in its config.json.
    file = Path(rest.removeprefix("local-dir:"), "config.json")
    files = [file.read_text()] if file.is_file() else []
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
    for name in ("mean", "std"):
        if changes.get(name):
            prepared = replace(prepared, **{name: tuple(changes[name])})
    if changes.get("size"):
        prepared = prepared.at(changes["size"])
    config = Config(
        dict(
            default_scope="mmpretrain",
            data_preprocessor=dict(
                mean=[255 * value for value in prepared.mean],
                std=[255 * value for value in prepared.std],
                to_rgb=True,
            ),
            test_dataloader=dict(dataset=dict(pipeline=prepared.pipeline)),
        )
    )
    architecture = dict(architecture=architecture, size=prepared.img_size)
    is_random = changes.get("random", False)
    loaded = checkpoint_of(title, network, config.data_preprocessor, architecture, missing, is_random)
    print_once(f"{title}: {prepared}")
    return config, loaded


def _released(name: str) -> Config:
    """The recipe of the authors' weights."""
    from mmpretrain.apis.model import ModelHub, list_models

    import mapet_mm.hub  # noqa: F401

    released = [ModelHub.get(model) for model in list_models(pattern="mapet*released*")]
    found = {model.weights: model.config for model in released}
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
        known = read_description(meta)
        backbone, _ = as_start(weights)
    except ValueError as error:
        raise UserError(f"{path}: {error}, or name its config first: CONFIG {path}") from error
    options = dict(
        arch=dict(num_heads=known.num_heads, **sizes_of(backbone)),
        patch_size=known.patch_size,
        with_cls_token=CLASS_TOKEN in backbone,
        final_norm=FINAL_NORM in backbone,
        out_type="raw",
    )
    if changes.get("random"):
        torch.manual_seed(0)
    vit = MaPeTViT(img_size=changes.get("size") or known.img_size, **options)
    if changes.get("random"):
        vit.init_weights()
        return _prepared(RANDOM, vit, known, changes, options)
    own = {name.removeprefix("backbone."): value for name, value in backbone.items()}
    vit.load_state_dict({name: value for name, value in own.items() if not name.startswith("ln2.")})
    return _prepared(path, vit, known, changes, options)
