"""The sets of images to evaluate on, as a folder or a config declares them, each with a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmengine.utils import to_2tuple

from mapet_mm.datasets.classes import NO_CLASSES
from mapet_mm.datasets.look import as_in_training
from mapet_mm.evaluation.folders import class_loaders, folder_loaders
from mapet_mm.evaluation.images import Data, ImageSet, ImageSetError
from mapet_mm.interop.description import ContinuedViT, Preparation, description_of
from mapet_mm.utils.config import read_config, scope_of, type_name
from mapet_mm.utils.dist import print_once
from mapet_mm.utils.errors import listed
from mapet_mm.utils.run_folder import EXPORTS

SECTION = "evaluation"  # of a config
NO_SETS = ("folder", "folders", "per_class", "protocols", "version")  # its other entries
NAMED_FILES = ("ann_file", "store", "left_out", "groups")  # by a dataset: lists of images, a token store


def read_image_sets(config: Config, path: str | None = None, **said: Any) -> dict[str, ImageSet]:
    """The image sets of a model's config, or those of a folder or another config: see `DeclaredSets`.

    Args:
        config: the model's.
        path: see `Data`.
        **said: see `Data`.
    """
    return DeclaredSets(config, Data(path, **said)).of_model(config)


class DeclaredSets:
    """The image sets that a folder or a config declares, for any number of models: names are read once.

    Args:
        config: its section `evaluation` names the sets, each as a data loader, or their `folder`; `view` may
            be a transform instead, such as `dict(type="RandomFlip", prob=1.0)`, which makes a second view of
            `val`. Without a section, the sets of `knn_probe` are 'train' and 'val'.
        data: a folder of `folder_loaders`, or another config with such a section, and what is said of it.
        loaders: of a folder, in place of those that its layout says.

    Raises:
        ImageSetError: no images, or labels, levels and groups for images that are in no folder.
    """

    def __init__(self, config: Config, data: Data, loaders: Mapping[str, Any] | None = None) -> None:
        self.data = data
        self.declared: Config | None = None  # of a folder, each model's own config stands for it
        if data.path and Path(data.path).is_dir():
            self.loaders = loaders or folder_loaders(Path(data.path), data)
        else:
            self.declared = declaring_config(config, data.path)
            self.loaders = sets_of_config(self.declared, data)
        self._read: dict[str, ImageSet] = {}

    def of_model(self, config: Config) -> dict[str, ImageSet]:
        """The sets by name. Those without a pipeline take the model's: the one of `val`, or of the test.

        Raises:
            ImageSetError: there is no such pipeline, or groups have images in `train` and in another set.
        """
        declared = config if self.declared is None else self.declared
        found = {}
        for name, loader in self.loaders.items():
            of_images = name
            transforms = []
            if "type" in loader:  # a transform that makes the second view
                of_images = "val"
                transforms = [loader]
            loader = self._with_pipeline(name, self.loaders[of_images], declared, config)
            innermost(loader)["pipeline"][-1:-1] = transforms
            with DefaultScope.overwrite_default_scope(scope_of(declared)):
                found[name] = ImageSet(name, loader, self._read.get(of_images))
            self._read[name] = found[name]
        require_whole_groups(found)
        return found

    def _with_pipeline(
        self, name: str, loader: Mapping[str, Any], declared: Config, config: Config
    ) -> dict[str, Any]:
        """A copy of a loader whose files are found and whose dataset has a pipeline: its own, or the model's.

        Args:
            name: of the set.
            loader: of the set.
            declared: the config that names it.
            config: the model's.
        """
        loader = copy.deepcopy(dict(loader))
        dataset = innermost(loader)
        _find_files(dataset, declared)
        if dataset.get("pipeline") is None:
            own = _model_loader(config, self.data.path or declared.filename)
            loader = {**own, **loader}  # with its options, but for those that it names itself
            dataset["pipeline"] = _pipeline_of(own, dense=name.startswith("dense"))
        if self.data.tiles and "tiles" in dataset:
            load, *steps = dataset["pipeline"]
            dataset["pipeline"] = [dict(load, type="mapet_mm.LoadPicture", tile=self.data.tiles[0]), *steps]
        if self.data.workers is not None:
            loader["num_workers"] = self.data.workers
        return loader


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


def images_of_folder(config: Config, data: Data) -> ImageSet:
    """All images in a folder, without labels, by the pipeline of a model's config."""
    data = replace(data, class_level=NO_CLASSES)
    sets = DeclaredSets(config, data, class_loaders({"images": (data.path, "")}, data))
    return sets.of_model(config)["images"]


def declaring_config(config: Config, path: str | None) -> Config:
    """The config that declares image sets and protocols: another one if `path` names it."""
    if path is None or Path(path).is_dir():
        return config
    try:
        return read_config(path)
    except FileNotFoundError as error:
        raise ImageSetError(f"no folder of images, or config of image sets, `{path}`: {error}") from error


def sets_of_config(config: Config, data: Data) -> dict[str, Mapping[str, Any]]:
    """The loaders, some without a pipeline, that a config names: for its evaluation or, else, its training.

    Raises:
        ImageSetError: it names none, or none in folders for labels, levels and groups.
    """
    section = config.get(SECTION) or {}
    sets = {name: value for name, value in section.items() if name not in NO_SETS}
    folders = {name: (folder, "") for name, folder in sets.items() if isinstance(folder, str)}
    is_said = (data.labels, data.class_level, data.groups, data.tiles) != (None, None, None, None)
    if is_said and not (folders or section.get("folder")):
        raise ImageSetError(
            "--labels, --class-level, --groups and --tiles are for images of folders, but config "
            f"{config.filename} declares datasets: name a folder as --data"
        )
    loaders = folder_loaders(Path(section["folder"]), data) if section.get("folder") else {}
    of_folders = class_loaders(folders, data) if folders else {}
    loaders.update({name: of_folders.get(name, value) for name, value in sets.items()})
    probe = config.get("knn_probe") or {}
    if not loaders and probe:
        loaders = {"train": probe["train_dataloader"], "val": probe["val_dataloader"]}
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
