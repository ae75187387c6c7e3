"""Description of a network and its images that a state dict does not hold: heads, image size, preprocessing.

A training writes it into the `meta` of its checkpoints (`description_entry`); an export reads it from there.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mmengine.utils import to_2tuple
from mmpretrain.models.backbones import VisionTransformer
from torch import Tensor

from mapet_mm.interop.convert import CLASS_TOKEN, POSITIONS, sizes_of
from mapet_mm.utils.config import type_name
from mapet_mm.utils.run_folder import EXPORTS

ENTRY = "description"
# Interpolations that Pillow, timm and Hugging Face know, with Pillow's numbers.
INTERPOLATIONS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}
# Steps of a pipeline that leave the pixels as they are, and beginnings of the names of those that vary the
# images of a training and are left out elsewhere.
HARMLESS = ("LoadImageFromFile", "LoadAnnotations", "LoadTokenGrid", "PackInputs", "PackSegInputs")
VARYING = ("Random", "ColorJitter")
# Options that change a ViT's outputs without a trace in its weights, and the only value that others have.
FIXED = {"norm_cfg": dict(type="LN", eps=1e-6), "layer_cfgs": {}, "patch_cfg": {}}


@dataclass(frozen=True)
class Preparation:
    """The size, resize and normalisation with which a network takes its images."""

    img_size: tuple[int, int]  # height and width in pixels
    mean: tuple[float, ...]  # of the red, green and blue values, or those of each band, between 0 and 1
    std: tuple[float, ...]
    # The short side before the central crop; (height, width): the image is squashed to this before it;
    # None: it is squashed to `img_size`.
    resize: int | tuple[int, int] | None
    interpolation: str  # of this resizing
    crop: str = field(default="CenterCrop", kw_only=True)  # the transform's name

    @property
    def num_bands(self) -> int:
        """Number of bands of the images."""
        return len(self.mean)

    @property
    def colours(self) -> str:
        """'RGB', or '4-band'."""
        return "RGB" if self.num_bands == 3 else f"{self.num_bands}-band"

    @property
    def crop_pct(self) -> float:
        """The crop's share of the short side, rounded down so that timm computes the same `resize`."""
        if self.resize is None:
            return 1.0
        return math.floor(1e4 * min(self.img_size) / min(to_2tuple(self.resize))) / 1e4

    @property
    def is_squashed(self) -> bool:
        """True if the resizing changes the image's shape."""
        return not isinstance(self.resize, int)

    @property
    def pipeline(self) -> list[dict[str, Any]]:
        """MMPretrain's transforms that do it, apart from the normalisation."""
        options = dict(backend="pillow", interpolation=self.interpolation)
        resize = dict(type="ResizeEdge", scale=self.resize, **options)
        if self.is_squashed:
            resize = dict(type="Resize", scale=(self.resize or self.img_size)[::-1], **options)
        height, width = self.img_size
        # A token store keeps this as JSON, whose lists the transform does not take.
        crop = dict(type=self.crop, crop_size=height if height == width else (width, height))
        return [dict(type="LoadImageFromFile"), resize, crop, dict(type="PackInputs")]

    def at(self, side: int) -> "Preparation":
        """The same part of each image as a square of another size."""
        shortest = min(self.img_size)
        resize = self.resize
        if isinstance(resize, int):
            resize = round(resize * side / shortest)
        elif resize is not None:
            resize = tuple(round(edge * side / shortest) for edge in resize)
        return replace(self, img_size=(side, side), resize=resize)

    def in_timm(self, num_classes: int = 0) -> dict[str, Any]:
        """timm's `pretrained_cfg` for a ViT."""
        return {
            "input_size": [self.num_bands, *self.img_size],
            "fixed_input_size": True,
            "interpolation": self.interpolation,
            "crop_pct": self.crop_pct,
            "crop_mode": "squash" if self.is_squashed else "center",
            "mean": self.mean,
            "std": self.std,
            "num_classes": num_classes,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        }

    def in_hugging_face(self) -> dict[str, Any]:
        """The content of preprocessor_config.json for Hugging Face's `AutoImageProcessor.from_pretrained`."""
        whole = dict(zip(("height", "width"), self.img_size, strict=True))
        size = whole
        if isinstance(self.resize, int):
            size = {"shortest_edge": self.resize}
        elif self.resize is not None:
            size = dict(zip(("height", "width"), self.resize, strict=True))
        return {
            "image_processor_type": "BitImageProcessor",
            "size": size,
            "resample": INTERPOLATIONS[self.interpolation],
            "crop_size": whole,
            "image_mean": self.mean,
            "image_std": self.std,
        }

    def __str__(self) -> str:
        height, width = self.img_size
        size = f"short side {self.resize} {self.interpolation}, central {height} x {width}"
        if self.resize is None:
            size = f"squashed to {height} x {width} {self.interpolation}"
        elif self.is_squashed:
            squashed = f"squashed to {self.resize[0]} x {self.resize[1]} {self.interpolation}"
            size = f"{squashed}, central {height} x {width}"
        return f"images: {self.colours}, {size}, mean {self.mean}, std {self.std}"


@dataclass(frozen=True)
class Description(Preparation):
    """Description of a plain ViT and its images."""

    patch_size: int
    num_heads: int
    embed_dims: int  # to recognise the weights
    feature: str  # that a classifier reads: 'cls_token' | 'avg_featmap' | ..., of the last layer
    others: tuple[str, ...] = ()  # steps of the pipeline that no library is told about

    @property
    def num_patches(self) -> int:
        """Number of patches of an image."""
        return math.prod(side // self.patch_size for side in self.img_size)

    def __str__(self) -> str:
        others = f"; prepare them otherwise as in training: {', '.join(self.others)}" if self.others else ""
        return super().__str__() + others

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless these are the weights of the described network."""
        patches = weights[POSITIONS].shape[1] - (CLASS_TOKEN in weights)
        found = sizes_of(weights)["embed_dims"], patches
        patch = tuple(weights["backbone.patch_embed.projection.weight"].shape[1:])
        expected = self.num_bands, self.patch_size, self.patch_size
        if found != (self.embed_dims, self.num_patches) or patch != expected:
            raise ValueError(
                f"the config's network is {self.embed_dims} wide, with {self.num_patches} {self.colours} "
                f"patches of {self.patch_size} x {self.patch_size}; the weights are {found[0]} wide, with "
                f"{patches} patches of shape {patch}"
            )


@dataclass(frozen=True)
class ContinuedViT:
    """What a training that continues a ViT of timm or Hugging Face knows of it, from its start on.

    It is an entry of the training's config and of its checkpoints.
    """

    timm: dict[str, Any]  # the content of config.json
    hf: dict[str, Any] | None  # likewise; None if Hugging Face has no such network
    hf_preprocessor: dict[str, Any]  # the content of preprocessor_config.json
    images: Preparation
    norm_eps: float | None  # that the norms add to the variance, if timm's network has another
    sizes: dict[str, int]  # patch_size, embed_dims, num_extra_tokens

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> "ContinuedViT":
        """Of the entry of a config, or of a file's metadata."""
        return cls(**{**entry, "images": Preparation(**_with_tuples(entry["images"]))})

    def with_bands(self, mean: Sequence[float], std: Sequence[float]) -> "ContinuedViT":
        """The same network of images with other bands, by the mean and standard deviation of each."""
        images = replace(self.images, mean=tuple(mean), std=tuple(std))
        model_args = {**(self.timm.get("model_args") or {}), "in_chans": images.num_bands}
        return replace(
            self,
            timm={**self.timm, "model_args": model_args, "pretrained_cfg": images.in_timm()},
            hf=self.hf and {**self.hf, "num_channels": images.num_bands},
            hf_preprocessor=images.in_hugging_face(),
            images=images,
        )


def description_entry(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Entry for the `meta` of a training's checkpoints, by which they are exported.

    Of a continued ViT, what its start said; else the description of this package's, or none if other
    libraries do not have its network.
    """
    if cfg.get(EXPORTS):
        return {EXPORTS: json.loads(json.dumps(cfg[EXPORTS]))}  # plain, not the config's own dictionaries
    try:
        return {ENTRY: asdict(description_of(cfg))}
    except ValueError:
        return {}


def read_description(meta: Mapping[str, Any]) -> Description:
    """The description in a file's metadata.

    Raises:
        ValueError: there is none.
    """
    entry = meta.get(ENTRY)
    if not entry:
        raise ValueError(
            "the file does not describe its network and images: give the training's config (--config)"
        )
    if isinstance(entry, str):  # in a .safetensors header
        entry = json.loads(entry)
    return Description(**_with_tuples(entry))


def _with_tuples(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry with tuples, which JSON has as lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}


def description_of(cfg: Mapping[str, Any]) -> Description:
    """Describe a config's network and its images.

    Raises:
        ValueError: other libraries do not have this network, or do not prepare images in this way.
    """
    try:
        return _described(cfg)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the config has another form than a ViT's: {error!r}") from error


def _described(cfg: Mapping[str, Any]) -> Description:
    backbone = cfg["model"]["backbone"]
    arch = backbone["arch"]
    arch = VisionTransformer.arch_zoo[arch.lower()] if isinstance(arch, str) else arch
    patch_cfg = dict(backbone.get("patch_cfg") or {})
    patch_cfg.pop("in_channels", None)  # as many as `mean` has values
    options = dict(backbone, patch_cfg=patch_cfg)
    for name, value in FIXED.items():
        given = options.get(name) or value
        if given != value:
            raise ValueError(f"the config's backbone has {name}={given}, other libraries' ViT {value}")
    layers = backbone.get("out_indices", -1)
    last = layers if isinstance(layers, int) else layers[-1]
    feature = backbone.get("out_type", "cls_token")
    preprocessor = cfg["model"].get("data_preprocessor") or cfg["data_preprocessor"]
    is_turned = preprocessor.get("to_rgb") or preprocessor.get("bgr_to_rgb")
    if not is_turned and len(preprocessor["mean"]) == 3:
        raise ValueError("the config's images are BGR (`data_preprocessor` without to_rgb=True)")
    mean, std = (tuple(round(value / 255, 6) for value in preprocessor[name]) for name in ("mean", "std"))
    img_size = _pair(backbone.get("img_size", 224))
    return Description(
        img_size=img_size,
        patch_size=backbone.get("patch_size", 16),
        num_heads=arch["num_heads"],
        embed_dims=arch["embed_dims"],
        feature=feature if last in (-1, arch["num_layers"] - 1) else f"{feature} of layer {last}",
        mean=mean,
        std=std,
        **_resizing(cfg, img_size),
    )


def _resizing(cfg: Mapping[str, Any], img_size: tuple[int, int]) -> dict[str, Any]:
    """Resizing of a pipeline, and its other steps."""
    found = dict(resize=min(img_size), interpolation="bicubic")
    others = []
    for step in _pipeline(cfg):
        kind = type_name(step["type"])
        if kind == "ResizeEdge" and step.get("edge", "short") == "short":
            found = dict(resize=step["scale"], interpolation=step.get("interpolation", "bilinear"))
        elif kind == "EfficientNetCenterCrop":
            edge = step["crop_size"] + step.get("crop_padding", 32)
            found = dict(resize=edge, interpolation=step.get("interpolation", "bicubic"))
        elif kind == "Resize" and not step.get("keep_ratio") and _pair(step["scale"]) == img_size[::-1]:
            found = dict(resize=None, interpolation=step.get("interpolation", "bilinear"))
        else:
            is_central_crop = kind == "CenterCrop" and _pair(step["crop_size"]) == img_size
            if not is_central_crop and kind not in HARMLESS and not kind.startswith(VARYING):
                others.append(kind)
            continue
        if step.get("backend", "cv2") == "cv2":
            others.append("OpenCV's resizing, which does not smooth")
    if found["interpolation"] not in INTERPOLATIONS:
        raise ValueError(f"the config resizes images by `{found['interpolation']}`")
    return {**found, "others": tuple(others)}


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    """A size of both sides, or of each."""
    return tuple(to_2tuple(size))


def _pipeline(cfg: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The transforms of the images that the trained network is tested on, or else trained on."""
    loaders = (cfg.get(f"{split}_dataloader") for split in ("test", "val", "train"))
    dataset = next(filter(None, loaders), {}).get("dataset", {})
    while "dataset" in dataset:  # a wrapper
        dataset = dataset["dataset"]
    # Stored squares have been through their own steps.
    for step in [*(dataset.get("square") or ()), *dataset.get("pipeline", ())]:
        if type_name(step["type"]) == "MultiView":  # the first is the network's, the second a tokenizer's
            yield from step["transforms"][0]
        elif type_name(step["type"]) == "EachBand":
            yield from step["transforms"]
        else:
            yield step
