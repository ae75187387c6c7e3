"""The image sets that a config names for an evaluation, or a folder of images in their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmengine.config import Config, ConfigDict
from mmengine.registry import DefaultScope

from mapet_mm.engine.runners.launch import read_config
from mapet_mm.evaluation.image_sets import ImageSet, ImageSetError, check_class_names, pipelines_of
from mapet_mm.utils.config import plain, scope_of, type_name, with_type_names

SECTION = "evaluation"  # of a config


def read_image_sets(config: Config, data: str | None = None) -> dict[str, ImageSet]:
    """The image sets of a config, or of what stands in for it.

    Args:
        config: the model's config. Its section `evaluation` names the sets, each as a data loader; where it
            names none, those of `knn_probe` are 'train' and 'val'.
        data: another config with such a section; or a folder of images with `train` and `val` in it, to
            which the pipeline of the model's config is applied.

    Raises:
        ImageSetError: no images, or `dense_train` and `dense_val` that name their classes differently.
    """
    declared = config
    if data is not None and Path(data).is_dir():
        loaders = _folder_loaders(config, Path(data))
    else:
        declared = config if data is None else read_config(data)
        loaders = _declared_loaders(declared)
        if not loaders:
            raise ImageSetError(
                f"config {declared.filename} names no images to evaluate on: give it a section `{SECTION}`, "
                "or --data"
            )
    with DefaultScope.overwrite_default_scope(scope_of(declared)):
        images = {name: ImageSet(name, loader) for name, loader in loaders.items()}
    if {"dense_train", "dense_val"} <= set(images):  # the protocols that compare them read one's names only
        check_class_names(images["dense_train"], images["dense_val"])
    return images


def _declared_loaders(config: Config) -> dict[str, Any]:
    """The image sets that a config names; none where its sections have options of protocols alone."""
    section = {name: loader for name, loader in (config.get(SECTION) or {}).items() if name != "protocols"}
    probe = config.get("knn_probe") or {}
    return section or {
        name: probe[f"{name}_dataloader"] for name in ("train", "val") if f"{name}_dataloader" in probe
    }


def _folder_loaders(config: Config, folder: Path) -> dict[str, Any]:
    loaders = _declared_loaders(config)
    if not loaders and scope_of(config) == "mmpretrain":  # others have pixel labels or boxes, these have not
        loaders = {"val": config.get("test_dataloader")}
    if not loaders.get("val"):
        raise ImageSetError(
            f"config {config.filename} has no pipeline for the images in {folder}: give it a section "
            f"`{SECTION}`, or name a config with one as --data"
        )
    made = {}
    for name in ("train", "val"):
        if not (folder / name).is_dir():
            raise ImageSetError(f"{folder} has no folder `{name}`: it takes `train` and `val`")
        pipeline = _without_tokens(loaders["val"].dataset.pipeline)
        known = dict(type="CustomDataset", data_root=str(folder), data_prefix=name, pipeline=pipeline)
        if (listing := folder / "meta" / f"{name}.txt").is_file():
            known["ann_file"] = f"meta/{name}.txt"
            known["with_label"] = _has_labels(listing)
        else:  # a folder a class, or no labels
            known["with_label"] = any(path.is_dir() for path in (folder / name).iterdir())
        made[name] = ConfigDict(loaders["val"], dataset=known)
    return made


def _has_labels(listing: Path) -> bool:
    """Whether a list of images, as MMPretrain's CustomDataset reads it, gives them classes.

    Raises:
        ImageSetError: it is empty, or a line is not like the others.
    """
    takes = "it takes a line `PATH CLASS`, or `PATH`, an image"
    lines = [line.strip() for line in listing.read_text().removesuffix("\n").split("\n")]
    if not any(lines):
        raise ImageSetError(f"{listing} is empty: {takes}")
    labelled = [line.rpartition(" ")[2].isdigit() for line in lines]
    for number, (line, has_label) in enumerate(zip(lines, labelled, strict=True), start=1):
        other = "\t" in line or line.startswith("\ufeff")  # Windows' mark at the beginning of a text
        if other or not line or has_label != labelled[0]:
            raise ImageSetError(
                f"{listing}, line {number} is {line!r}: {takes}, all alike, with a space between"
            )
    return labelled[0]


def differs_in_pipeline(config: Config, images: Mapping[str, ImageSet]) -> str | None:
    """The first of some image sets whose images a config's own pipeline would make otherwise, if any.

    Args:
        config: another model's config, with image sets of its own or a test pipeline, or without.
        images: the image sets that are used for all models.
    """
    test = {"val": config.test_dataloader} if config.get("test_dataloader") else {}
    own = _declared_loaders(config) or test
    for name, used in images.items():
        if name in own and _pixels(pipelines_of(own[name]["dataset"])) != _pixels(used.pipelines):
            return name
    return None


def _pixels(pipelines: Iterable[Any]) -> list[Any]:
    """What some pipelines do to images, for comparisons; packing them changes none."""
    return [plain(with_type_names(_without_tokens(steps)[:-1])) for steps in pipelines]


def _without_tokens(pipeline: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A pipeline without stored tokens, which are a pre-training's, and of its own images."""
    steps = [dict(step) for step in pipeline or () if "Token" not in type_name(step["type"])]
    if steps:
        steps[-1].pop("algorithm_keys", None)
    return steps
