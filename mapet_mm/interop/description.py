"""What a state dict does not say about a network: its number of heads, and how images are prepared for it.

Both are in the training's config, whose text MMEngine stores in each checkpoint.
"""

import ast
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from mmpretrain.models.backbones import VisionTransformer
from torch import Tensor

from mapet_mm.utils.config import type_name

# Interpolations that Pillow, timm and Hugging Face know, with Pillow's numbers.
INTERPOLATIONS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}
# Steps of a pipeline that leave the pixels as they are.
HARMLESS = ("LoadImageFromFile", "LoadAnnotations", "LoadTokenGrid", "PackInputs", "PackSegInputs")
# Beginnings of the names of steps that vary the images of a training, and are left out elsewhere.
VARYING = ("Random", "ColorJitter")
# What changes a ViT's outputs without a trace in its weights, and the only value that others have as well.
FIXED = {"norm_cfg": dict(type="LN", eps=1e-6), "layer_cfgs": {}, "patch_cfg": {}}


@dataclass(frozen=True)
class Description:
    """Description of a plain ViT and its images.

    Args:
        img_size: height and width of the images in pixels.
        patch_size: side of a patch in pixels.
        embed_dims: width of the tokens.
        num_layers: depth.
        num_heads: number of attention heads.
        feedforward_channels: width inside the MLP.
        pool: 'token' | 'avg', how the last layer gives the feature.
        mean: of the red, green and blue values between 0 and 1.
        std: standard deviation of these values.
        resize: length of the image's short side before the central crop of `img_size`; None: the image is
            squashed to `img_size`.
        interpolation: 'bicubic' | ..., of this resizing.
        others: what else the config does with images, which no library is told.
    """

    img_size: tuple[int, int]
    patch_size: int
    embed_dims: int
    num_layers: int
    num_heads: int
    feedforward_channels: int
    pool: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    resize: int | None
    interpolation: str
    others: tuple[str, ...] = ()

    @property
    def crop_pct(self) -> float:
        """The crop's share of the short side, rounded down so that timm computes the same `resize`."""
        return 1.0 if self.resize is None else math.floor(1e4 * min(self.img_size) / self.resize) / 1e4

    def __str__(self) -> str:
        height, width = self.img_size
        if self.resize is None:
            size = f"squashed to {height} x {width} {self.interpolation}"
        else:
            size = f"short side {self.resize} {self.interpolation}, central {height} x {width}"
        others = f"; prepare them otherwise as in training: {', '.join(self.others)}" if self.others else ""
        return f"images: RGB, {size}, mean {self.mean}, std {self.std}{others}"


def config_of(text: str) -> dict[str, Any]:
    """The values in a config's text, as MMEngine writes it into checkpoints, without executing the text.

    Assignments of anything but literals and `dict(...)` are ignored.
    """
    values = {}
    with suppress(SyntaxError, ValueError, RecursionError):
        for statement in ast.parse(text).body:
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                with suppress(ValueError):
                    values[statement.targets[0].id] = ast.literal_eval(_Literals().visit(statement.value))
    return values


class _Literals(ast.NodeTransformer):
    """Rewrites `dict(a=1)` as `{"a": 1}`."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        named = all(keyword.arg for keyword in node.keywords)
        if isinstance(node.func, ast.Name) and node.func.id == "dict" and named and not node.args:
            keys = [ast.Constant(keyword.arg) for keyword in node.keywords]
            return ast.Dict(keys, [keyword.value for keyword in node.keywords])
        return node


def describe(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> Description:
    """Describe the network of these weights (of `convert.network`) and its images, from its config.

    Raises:
        ValueError: the config lacks an entry, or is another network's.
    """
    if not config:
        raise ValueError("the file has no config of a training")
    backbone = config.get("model", {}).get("backbone", {})
    kernel = weights["backbone.patch_embed.projection.weight"]
    _, channels, *patch = kernel.shape
    if channels != 3 or patch[0] != patch[1]:
        raise ValueError(
            f"patches have {patch[0]} x {patch[1]} pixels of {channels} channels, other libraries' are "
            "square and RGB"
        )
    arch = _architecture(backbone)
    found = sizes_of(weights)
    for name, value in found.items():
        if arch[name] != value:
            raise ValueError(f"the config's backbone has {name}={arch[name]}, the weights have {value}")
    for name, value in FIXED.items():
        if (given := backbone.get(name) or value) != value:
            raise ValueError(f"the config's backbone has {name}={given}, other libraries' ViT {value}")
    img_size = _pair(backbone.get("img_size", 224))
    patches = weights["backbone.pos_embed"].shape[1] - ("backbone.cls_token" in weights)
    if math.prod(side // kernel.shape[-1] for side in img_size) != patches:
        raise ValueError(f"the config's images have {img_size} pixels, the weights are for {patches} patches")
    return Description(
        img_size=img_size,
        patch_size=kernel.shape[-1],
        num_heads=arch["num_heads"],
        pool=_pool(weights, backbone, found["num_layers"]),
        **found,
        **_images(config, img_size),
    )


def sizes_of(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Width of the tokens, depth and width inside the MLP of a plain ViT, under the names of configs."""
    return dict(
        embed_dims=len(weights["backbone.patch_embed.projection.weight"]),
        num_layers=sum(name.endswith("attn.qkv.weight") for name in weights),
        feedforward_channels=weights["backbone.layers.0.ffn.layers.1.weight"].shape[-1],
    )


def _architecture(backbone: Mapping[str, Any]) -> Mapping[str, int]:
    arch = backbone.get("arch")
    if isinstance(arch, str):
        arch = VisionTransformer.arch_zoo.get(arch.lower())
    if not arch:
        raise ValueError("the config names no architecture of a ViT (`model.backbone.arch`)")
    return arch


def _pool(weights: Mapping[str, Tensor], backbone: Mapping[str, Any], num_layers: int) -> str:
    """The feature that a classifier reads; for a pre-trained backbone alone, the mean of the patches."""
    if "head.fc.weight" not in weights:
        return "avg"
    layers = backbone.get("out_indices", -1)
    layer = layers if isinstance(layers, int) else layers[-1]
    if layer not in (-1, num_layers - 1):
        raise ValueError(f"the config classifies the output of layer {layer}, other libraries the last one's")
    if "backbone.ln2.weight" in weights:
        return "avg"
    if (out_type := backbone.get("out_type", "cls_token")) != "cls_token":
        raise ValueError(
            f"the config classifies out_type={out_type!r}; known are 'cls_token' and 'avg_featmap'"
        )
    return "token"


def _images(config: Mapping[str, Any], img_size: tuple[int, int]) -> dict[str, Any]:
    """Mean, standard deviation and resizing of the images, from the config."""
    preprocessor = config.get("model", {}).get("data_preprocessor") or config.get("data_preprocessor") or {}
    if not preprocessor.get("mean") or not preprocessor.get("std"):
        raise ValueError("the config's `data_preprocessor` has no mean and std")
    if not (preprocessor.get("to_rgb") or preprocessor.get("bgr_to_rgb")):
        raise ValueError("the config's images are BGR (`data_preprocessor` without to_rgb=True)")
    images = _resizing(config, img_size)
    if images["interpolation"] not in INTERPOLATIONS:
        raise ValueError(f"the config resizes images by `{images['interpolation']}`")
    for name in ("mean", "std"):
        images[name] = tuple(round(value / 255, 6) for value in preprocessor[name])
    return images


def _resizing(config: Mapping[str, Any], img_size: tuple[int, int]) -> dict[str, Any]:
    """How images get their size, and what else is done to them."""
    images, others = dict(resize=min(img_size), interpolation="bicubic"), []
    for transform in _pipeline(config):
        kind = type_name(transform["type"]).rpartition(".")[2]
        if kind == "ResizeEdge" and transform.get("edge", "short") == "short":
            images.update(resize=transform["scale"], interpolation=transform.get("interpolation", "bilinear"))
        elif kind == "EfficientNetCenterCrop":
            resize = transform["crop_size"] + transform.get("crop_padding", 32)
            images.update(resize=resize, interpolation=transform.get("interpolation", "bicubic"))
        elif kind == "Resize" and _squashes(transform, img_size):
            images.update(resize=None, interpolation=transform.get("interpolation", "bilinear"))
        else:
            harmless = (
                kind in HARMLESS
                or kind.startswith(VARYING)
                or (kind == "CenterCrop" and _pair(transform["crop_size"]) == img_size)
            )
            others += [] if harmless else [kind]
            continue
        if transform.get("backend", "cv2") == "cv2":
            others.append("OpenCV's resizing, which does not smooth")
    return images | {"others": tuple(others)}


def _squashes(resize: Mapping[str, Any], img_size: tuple[int, int]) -> bool:
    """Whether a `Resize` gives images of this height and width, whatever their shape."""
    scale = resize.get("scale")
    return not resize.get("keep_ratio") and scale is not None and _pair(scale)[::-1] == img_size


def _pipeline(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The transforms of the images that the trained network is tested on, or else trained on."""
    loaders = (config.get(f"{split}_dataloader") for split in ("test", "val", "train"))
    dataset = next(filter(None, loaders), {}).get("dataset", {})
    while "dataset" in dataset:  # a wrapper
        dataset = dataset["dataset"]
    for transform in dataset.get("pipeline", ()):
        if (
            type_name(transform["type"]) == "MultiView"
        ):  # the first is the network's, the second a tokenizer's
            yield from transform["transforms"][0]
        else:
            yield transform


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


def metadata(description: Description) -> dict[str, str]:
    """A description as text values for a .safetensors header."""
    return {name: json.dumps(value) for name, value in asdict(description).items()}


def num_patches(meta: Mapping[str, Any]) -> int | None:
    """The number of patches in what `metadata` wrote; None if the file has other metadata or none."""
    try:
        height, width = json.loads(meta["img_size"])
        patch_size = json.loads(meta["patch_size"])
        return (height // patch_size) * (width // patch_size)
    except (KeyError, TypeError, ValueError):
        return None
