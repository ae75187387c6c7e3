"""Models by name, each with its weights and a config that says how it takes images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mmengine.config import Config
from torch import nn

from mapet_mm.datasets.look import reading_pictures
from mapet_mm.evaluation.checkpoints import RANDOM, Model, load_checkpoint, model_of
from mapet_mm.evaluation.image_sets import add_test_pipeline
from mapet_mm.evaluation.libraries import LIBRARIES, one_line
from mapet_mm.evaluation.weights import load_weights
from mapet_mm.interop.convert import CLASS_TOKEN, FINAL_NORM, as_start, sizes_of
from mapet_mm.interop.description import Preparation, read_description
from mapet_mm.interop.released import SCHEME
from mapet_mm.models import MaPeTViT
from mapet_mm.utils.config import in_package, read_config
from mapet_mm.utils.dist import print_once
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.identity import IDENTITY
from mapet_mm.utils.run_folder import PRETRAINING, Run
from mapet_mm.weight_files import read_checkpoint

FETCHED = "with a checkpoint as second argument no weights are fetched"
CONFIGS = (".py", ".yml", ".yaml", ".json")


@dataclass(frozen=True)
class Request:
    """A model that was found by `find_model`; `load` gives it."""

    name: str
    checkpoint: str | None = None
    options: Mapping[str, Any] | None = None
    prefix: str | None = None
    random: bool = False
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    size: int | None = None
    pictures: Mapping[str, Any] | None = None

    def load(self) -> Model:
        """The model with its weights; UserError for weights that are not its."""
        model = SOURCES[source_of(self.name)].load(self)
        if self.pictures:
            return replace(model, config=reading_pictures(model.config, self.pictures))
        return model


class Source(NamedTuple):
    """Where a model comes from.

    Args:
        words: for the user.
        takes: the entries of a `Request` that it can use, beside `mean` and `std`.
        find: raises UserError unless the model is there; reads no weights.
        load: gives the model.
    """

    words: str
    takes: tuple[str, ...]
    find: Callable[[Request], Any]
    load: Callable[[Request], Model]


def load_model(name: str, checkpoint: str | None = None, **asked: Any) -> Model:
    """A model with its weights; the arguments and errors are those of `find_model`.

    Examples:
        >>> load_model("timm:vit_small_patch16_224", size=192).name  # doctest: +SKIP
        'timm:vit_small_patch16_224'
    """
    return find_model(name, checkpoint, **asked).load()


def find_model(name: str, checkpoint: str | None = None, **asked: Any) -> Request:
    """Look a model up, in seconds: no weights are read.

    Args:
        name: a config; the folder of a `mapet-mm pretrain`; `timm:NAME`, with timm's own names such as
            `local-dir:FOLDER`; `hf:NAME_OR_FOLDER`; a folder or file that `mapet-mm convert` wrote; or
            `mapet://NAME`.
        checkpoint: weights to load instead of the model's own.
        **asked: `options`, entries to change in a config; `prefix` of the backbone's names in the checkpoint,
            by default one of the usual ones; `mean`, `std` and `size` in place of the model's own, size a
            square's side; `pictures`, options of `LoadPicture` for images that are no photographs, unless the
            model says how it reads them; `random=True` for the same network with random weights of seed 0.

    Raises:
        UserError: no such model or checkpoint, or something that such a model cannot use.
    """
    request = Request(name, checkpoint, **asked)
    source = SOURCES[source_of(name)]
    for key, (flag, remedy) in FLAGS.items():
        if getattr(request, key) and key not in source.takes:
            raise UserError(f"{flag}: {name} is {source.words}, which takes none: {remedy}")
    for key in ("mean", "std"):
        largest = max(getattr(request, key) or [0])
        if largest > 1:
            raise UserError(f"--{key} {largest:g}: it is of values between 0 and 1: divide it by 255")
    source.find(request)
    if checkpoint and "://" not in checkpoint and not Path(checkpoint).expanduser().exists():
        raise UserError(f"no such file: {checkpoint}")
    return request


# How an entry of a request is given, and what to do where it is of no use.
FLAGS = {
    "checkpoint": ("CHECKPOINT", "leave it out, or name the config of those weights: CONFIG CHECKPOINT"),
    "prefix": ("--prefix", "it is of the names in a CHECKPOINT"),
    "options": ("--cfg-options", "they change a config"),
    "size": ("--size", "name a config and change its own by --cfg-options"),
}


def source_of(name: str) -> str:
    """The key of `SOURCES` that a name belongs to; UserError if there is none."""
    library = name.partition(":")[0]
    if library in LIBRARIES:
        return library
    if name.startswith(SCHEME):
        return "released"
    if Path(name).is_dir():
        return _source_of_folder(Path(name))
    if name.endswith(CONFIGS) and Path(in_package(name)).is_file():
        return "config"
    if Path(name).is_file():
        return "file"
    known = ", ".join(f"{library}:NAME" for library in LIBRARIES)
    raise UserError(f"{name}: no such config, folder or file of weights; by name: {known}, {SCHEME}NAME")


def _source_of_folder(folder: Path) -> str:
    """The source of a folder; UserError for one of no library, or a part of a RUN."""
    config = folder / "config.json"
    if not config.is_file() and not (folder / IDENTITY).is_file():
        for run in reversed(folder.resolve().parents):  # MMEngine leaves a copy of the config in RUN/training
            if Run(run).exists:
                raise UserError(f"{folder} is a part of the RUN {run}: name that")
    if Run(folder).exists:
        return "run"
    if config.is_file():
        return "timm" if '"architecture"' in config.read_text() else "hf"
    raise UserError(
        f"{folder}: a folder without config.json (of timm or Hugging Face) or {PRETRAINING} (of `mapet-mm "
        "pretrain`)"
    )


def random_twin(request: Request, model: Model) -> Model | None:
    """The network of a model with random weights; None if its weights are random already."""
    if model.is_random:
        return None
    twin = replace(request, random=True).load()
    # Equal where the model itself has the weights of a config's seed, or none.
    return None if twin.digest == model.digest else twin


def _find_config(request: Request) -> tuple[Config, str | None]:
    """A config, and the checkpoint whose weights its backbone takes."""
    return read_config(in_package(request.name), options=request.options), request.checkpoint


def _find_run(request: Request) -> tuple[Config, str]:
    """The config of a RUN, and its last checkpoint."""
    run = Run(Path(request.name))
    checkpoint = request.checkpoint or str(run.newest_checkpoint)
    return read_config(run / PRETRAINING, options=request.options), checkpoint


def _find_released(request: Request) -> tuple[Config, str]:
    """The recipe of the authors' weights, and their name."""
    from mmpretrain.apis.model import ModelHub, list_models

    import mapet_mm.hub  # noqa: F401

    released = [ModelHub.get(model) for model in list_models(pattern="mapet*released*")]
    found = {model.weights: model.config for model in released}
    if request.name not in found:
        raise UserError(f"no weights {request.name}: there are {', '.join(sorted(found))}")
    return found[request.name], request.name


def _load_config(request: Request) -> Model:
    """The backbone of a config's model, which takes images by the config's pipeline."""
    config, checkpoint = SOURCES[source_of(request.name)].find(request)
    known = config.get("model", {}).get("data_preprocessor") or config.get("data_preprocessor") or {}
    for key in ("mean", "std"):
        if getattr(request, key):
            known[key] = [255 * value for value in getattr(request, key)]
    model = load_checkpoint(config, checkpoint, request.prefix, request.random)
    description = add_test_pipeline(config)
    prepared = f"images by the config's pipeline, mean {known.get('mean')}, std {known.get('std')}"
    print_once(f"{model.name}: {description or prepared}")
    return model


def _name_in_library(request: Request) -> tuple[str, str]:
    """A library, and the model's name there."""
    library, _, name = request.name.partition(":")
    if library in LIBRARIES:
        return library, name
    library = source_of(request.name)
    return library, f"local-dir:{request.name}" if library == "timm" else request.name


def _find_in_library(request: Request) -> None:
    if request.prefix and not request.checkpoint:
        raise UserError(f"--prefix: {FLAGS['prefix'][1]}, and there is none")
    library, name = _name_in_library(request)
    with one_line(request.name, "" if request.checkpoint or request.random else FETCHED):
        LIBRARIES[library].find(name)


def _load_of_library(request: Request) -> Model:
    """A model of timm or Hugging Face."""
    library, name = _name_in_library(request)
    checkpoint = None if request.random else request.checkpoint
    if request.random:
        torch.manual_seed(0)
    with_weights = not (checkpoint or request.random)
    with one_line(request.name, FETCHED if with_weights else ""):
        network, prepared, missing = LIBRARIES[library].load(name, with_weights, request.size)
    title = request.name
    if checkpoint:
        missing = load_weights(network, checkpoint, request.prefix)
        title += f", {Path(checkpoint).stem}"
    # A folder has its architecture in config.json.
    file = Path(name.removeprefix("local-dir:"), "config.json")
    files = [file.read_text()] if file.is_file() else []
    return _prepared(title, network, prepared, request, [request.name, files], missing)


def _load_file(request: Request) -> Model:
    """The plain ViT that a file of weights describes."""
    weights, meta = read_checkpoint(request.name)
    try:
        known = read_description(meta)
        backbone, _ = as_start(weights)
    except ValueError as error:
        raise UserError(
            f"{request.name}: {error}, or name its config first: CONFIG {request.name}"
        ) from error
    options = dict(
        arch=dict(num_heads=known.num_heads, **sizes_of(backbone)),
        patch_size=known.patch_size,
        with_cls_token=CLASS_TOKEN in backbone,
        final_norm=FINAL_NORM in backbone,
        out_type="raw",
    )
    if request.random:
        torch.manual_seed(0)
    vit = MaPeTViT(img_size=request.size or known.img_size, **options)
    if request.random:
        vit.init_weights()
    else:
        own = {name.removeprefix("backbone."): value for name, value in backbone.items()}
        vit.load_state_dict({name: value for name, value in own.items() if not name.startswith("ln2.")})
    return _prepared(request.name, vit, known, request, options)


def _prepared(
    title: str,
    network: nn.Module,
    prepared: Preparation,
    request: Request,
    architecture: Any,
    missing: Sequence[str] = (),
) -> Model:
    """A network with its weights, and a config with its normalisation and pipeline."""
    for name in ("mean", "std"):
        if getattr(request, name):
            prepared = replace(prepared, **{name: tuple(getattr(request, name))})
    if request.size:
        prepared = prepared.at(request.size)
    config = Config(
        dict(
            default_scope="mmpretrain",
            data_preprocessor=dict(
                mean=[255 * value for value in prepared.mean],
                std=[255 * value for value in prepared.std],
                to_rgb=prepared.num_bands == 3,
            ),
            test_dataloader=dict(dataset=dict(pipeline=prepared.pipeline)),
        )
    )
    architecture = dict(architecture=architecture, size=prepared.img_size)
    title = RANDOM if request.random else title
    scale = config.data_preprocessor
    model = model_of(title, network, config, scale, architecture, missing, request.random)
    print_once(f"{title}: {prepared}")
    return model


OF_CONFIG = ("checkpoint", "prefix", "options")
OF_LIBRARY = ("checkpoint", "prefix", "size")
SOURCES = {
    "config": Source("a config", OF_CONFIG, _find_config, _load_config),
    "run": Source("a RUN", OF_CONFIG, _find_run, _load_config),
    "timm": Source("a model of timm", OF_LIBRARY, _find_in_library, _load_of_library),
    "hf": Source("a model of Hugging Face", OF_LIBRARY, _find_in_library, _load_of_library),
    "released": Source("a name of the authors' weights", (), _find_released, _load_config),
    "file": Source("a file of weights", ("size",), lambda request: None, _load_file),
}
