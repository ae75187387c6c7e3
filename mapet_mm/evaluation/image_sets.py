"""The sets of images to evaluate on, as a folder or a config declares them, each with a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmengine.utils import to_2tuple

from mapet_mm.datasets.look import as_in_training
from mapet_mm.evaluation.folders import class_loaders, folder_loaders
from mapet_mm.evaluation.images import ImageSet, ImageSetError
from mapet_mm.interop.description import ContinuedViT, Preparation, description_of
from mapet_mm.utils.config import read_config, scope_of, type_name
from mapet_mm.utils.dist import print_once
from mapet_mm.utils.errors import listed
from mapet_mm.utils.run_folder import EXPORTS

SECTION = "evaluation"  # of a config
NO_SETS = ("folder", "folders", "per_class", "protocols", "version")  # its other entries
NAMED_FILES = ("ann_file", "store", "left_out", "groups")  # by a dataset: lists of images, a token store


def read_image_sets(
    config: Config,
    data: str | None = None,
    labels: str | None = None,
    class_level: int | None = None,
    workers: int | None = None,
    groups: str | None = None,
) -> dict[str, ImageSet]:
    """The image sets of a config, or of `data` instead.

    Args:
        config: the model's. Its section `evaluation` names the sets, each as a data loader, or their
            `folder`; `view` may be a transform instead, such as `dict(type="RandomFlip", prob=1.0)`, which
            makes a second view of `val`. Without a section, the sets of `knn_probe` are 'train' and
            'val'. Sets without a pipeline take the model's: the one of `val`, or of the test.
        data: another config with such a section, or a folder of `folder_loaders`.
        labels: file of lines `name class`, for the images of folders.
        class_level: level of the folders that are classes; see `classes_of`.
        workers: processes that load images, in place of the number that a loader names.
        groups: of the images of folders, which no division parts; see `groups_of`.

    Raises:
        ImageSetError: no images, or labels, levels and groups for images that are in no folder; or groups
            with images in `train` and in another set.
    """
    declared = declaring_config(config, data)
    if data and Path(data).is_dir():
        loaders = folder_loaders(Path(data), labels, class_level, groups)
    else:
        loaders = sets_of_config(declared, labels, class_level, groups)
    found = {}
    for name, loader in loaders.items():
        view = loader if "type" in loader else None  # a transform that makes the second view
        loader = with_pipeline(name, loaders["val"] if view else loader, declared, config, data)
        if view:
            innermost(loader)["pipeline"].insert(-1, view)
        if workers is not None:
            loader["num_workers"] = workers
        with DefaultScope.overwrite_default_scope(scope_of(declared)):
            found[name] = ImageSet(name, loader)
    require_whole_groups(found)
    return found


def require_whole_groups(sets: Mapping[str, ImageSet]) -> None:
    """Raise ImageSetError if a group is learnt from and tested on."""
    learnt = sets["train"].group_names if "train" in sets else set()
    for name, images in sets.items():
        divided = sorted(learnt & images.group_names) if name != "train" else []
        if divided:
            raise ImageSetError(
                f"groups: `train` and `{name}` both have images of {len(divided)}, such as "
                f"{listed(divided, most=3)}: move each to one side, or name a folder without `train` and "
                "`val`, which is divided by groups"
            )


def images_of_folder(config: Config, folder: Path, workers: int | None = None) -> ImageSet:
    """All images in a folder, without labels, by the pipeline of a model's config."""
    (loader,) = class_loaders({"images": (str(folder), "")}, class_level=0).values()
    loader = with_pipeline("images", loader, config, config, str(folder))
    if workers is not None:
        loader["num_workers"] = workers
    with DefaultScope.overwrite_default_scope(scope_of(config)):
        return ImageSet("images", loader)


def declaring_config(config: Config, data: str | None) -> Config:
    """The config that declares image sets and protocols: another one if `data` names it."""
    return read_config(data) if data and not Path(data).is_dir() else config


def sets_of_config(
    config: Config, labels: str | None, class_level: int | None, groups: str | None
) -> dict[str, Mapping[str, Any]]:
    """The loaders, some without a pipeline, that a config names: for its evaluation or, else, its training.

    Raises:
        ImageSetError: it names none, or none in folders for labels, levels and groups.
    """
    section = config.get(SECTION) or {}
    sets = {name: value for name, value in section.items() if name not in NO_SETS}
    folders = {name: (folder, "") for name, folder in sets.items() if isinstance(folder, str)}
    sources = (labels, class_level, groups)
    if sources != (None, None, None) and not (folders or section.get("folder")):
        raise ImageSetError(
            "--labels, --class-level and --groups are for images of folders, but config "
            f"{config.filename} declares datasets: name a folder as --data"
        )
    loaders = folder_loaders(Path(section["folder"]), *sources) if section.get("folder") else {}
    of_folders = class_loaders(folders, *sources) if folders else {}
    loaders.update({name: of_folders.get(name, value) for name, value in sets.items()})
    if loaders:
        return loaders
    probe = config.get("knn_probe") or {}
    keys = {"train": "train_dataloader", "val": "val_dataloader"}
    loaders = {name: probe[key] for name, key in keys.items() if key in probe}
    if loaders:
        return loaders
    if not config.get("train_dataloader"):
        raise ImageSetError(
            f"config {config.filename} names no images to evaluate on: give it a section `{SECTION}`, "
            "or --data"
        )
    print_once(f"{config.filename} names no images to evaluate on: these are the training's (--data FOLDER)")
    loader = dict(dataset=copy.deepcopy(config.train_dataloader["dataset"]))
    innermost(loader)["pipeline"] = None
    return {"val": loader}  # for measures without labels


def with_pipeline(
    name: str, loader: Mapping[str, Any], declared: Config, config: Config, data: str | None
) -> dict[str, Any]:
    """A copy of a loader whose files are found and whose dataset has a pipeline: its own, or the model's.

    Args:
        name: of the set.
        loader: of the set.
        declared: the config that names it.
        config: the model's.
        data: for an error.
    """
    loader = copy.deepcopy(dict(loader))
    dataset = innermost(loader)
    _find_files(dataset, declared)
    if dataset.get("pipeline") is None:
        own = _model_loader(config, data or declared.filename)
        loader = {**own, **loader}  # with its options, but for those that it names itself
        dataset["pipeline"] = _pipeline_of(own, dense=name.startswith("dense"))
    return loader


def innermost(loader: Mapping[str, Any]) -> dict[str, Any]:
    """A loader's dataset, without wrappers."""
    dataset = loader["dataset"]
    while "dataset" in dataset:
        dataset = dataset["dataset"]
    return dataset


def _find_files(dataset: dict[str, Any], config: Config) -> None:
    """Take the files that a dataset names from beside its config, where a RUN has them.

    In the working folder there may be those of another RUN. If the config itself is there, names stay as they
    are: they are part of the features' identity, and a RUN may be moved.
    """
    folder = Path(config.filename or "").parent
    for key in NAMED_FILES:
        name = dataset.get(key)
        if name and (folder / str(name)).exists() and folder.absolute() != Path.cwd():
            dataset[key] = str((folder / str(name)).absolute())


def add_test_pipeline(config: Config) -> Preparation | None:
    """Give a pre-training's config the pipeline of a test, resized as in training, unless it has one."""
    if any(config.get(key) for key in (SECTION, "knn_probe", "test_dataloader")):
        return None
    try:
        # A continued ViT takes its images as its start does.
        continued = config.get(EXPORTS)
        description = ContinuedViT.read(continued).images if continued else description_of(config)
    except ValueError:  # `_model_loader` says what is missing if it needs a pipeline
        return None
    config.test_dataloader = dict(dataset=dict(pipeline=as_in_training(description.pipeline, config)))
    return description


def _model_loader(config: Config, data: str) -> Mapping[str, Any]:
    """A loader with the model's own pipeline for a test."""
    loader = (config.get(SECTION) or {}).get("val")
    if loader is None and not config.get(SECTION):
        loader = (config.get("knn_probe") or {}).get("val_dataloader")
    if isinstance(loader, str):  # a folder, which has no pipeline
        loader = None
    if loader is None and scope_of(config) == "mmpretrain":  # others' images have pixel labels or boxes
        loader = config.get("test_dataloader")
    if not loader or not innermost(loader).get("pipeline"):
        raise ImageSetError(
            f"config {config.filename} has no pipeline for the images of {data}: give it a section "
            f"`{SECTION}`, or name a config with one as --data"
        )
    return loader


def _pipeline_of(loader: Mapping[str, Any], dense: bool) -> list[dict[str, Any]]:
    """A model's pipeline; for `dense` images with pixel labels, squashed to the model's size."""
    # Only a pre-training's own images have stored tokens.
    steps = [dict(step) for step in innermost(loader)["pipeline"] if "Token" not in type_name(step["type"])]
    steps[-1].pop("algorithm_keys", None)
    if not dense:
        return steps
    sizes = [step.get("crop_size") or step.get("scale") for step in steps]
    sizes = [size for size in sizes if size]
    if not sizes:
        raise ImageSetError("the model's pipeline has no size, to which images with pixel labels are resized")
    size = tuple(to_2tuple(sizes[-1]))
    known = next((step for step in steps if "interpolation" in step), {})
    resize = {key: known[key] for key in ("backend", "interpolation") if key in known}
    return [
        dict(type="LoadImageFromFile"),
        dict(type="mmseg.Resize", scale=size, keep_ratio=False, **resize),
        dict(type="mmseg.LoadAnnotations"),
        dict(type="mmseg.PackSegInputs"),
    ]
