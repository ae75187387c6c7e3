"""What other libraries need beside the weights: the architecture, and how images are prepared for it.

A state dict tells neither the number of heads nor mean and standard deviation; both are in the config of the
training, whose text MMEngine keeps in each checkpoint. timm and Hugging Face read them from a folder.
"""

import ast
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmpretrain.models.backbones import VisionTransformer
from torch import Tensor

from mapet_mm.convert import mm_to_hf, mm_to_timm, network
from mapet_mm.file_replacement import replace_file
from mapet_mm.weight_files import write_weights

# Pillow's numbers, as Hugging Face writes them.
RESAMPLE = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}
TIMM_NAMES = {192: "tiny", 384: "small", 768: "base", 1024: "large"}


@dataclass(frozen=True)
class Description:
    """A plain ViT and its images.

    Args:
        img_size: height and width of the images in pixels.
        patch_size: side of a patch in pixels.
        embed_dims: width of the tokens.
        num_layers: depth.
        num_heads: heads of attention.
        feedforward_channels: width inside the MLP.
        pool: 'token' | 'avg', what of the last layer is the feature.
        mean: of the red, green and blue values between 0 and 1.
        std: of the same.
        resize: length of the image's short side before the central crop of `img_size`.
        interpolation: 'bicubic' | ..., of that resizing.
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
    resize: int
    interpolation: str

    @property
    def crop_pct(self) -> float:
        """The crop's share of the short side, rounded down so that timm finds `resize` again."""
        return math.floor(1e4 * min(self.img_size) / self.resize) / 1e4

    def __str__(self) -> str:
        height, width = self.img_size
        return (
            f"images: RGB, short side {self.resize} {self.interpolation}, central {height} x {width}, "
            f"mean {self.mean}, std {self.std}"
        )


def config_of(text: str) -> dict[str, Any]:
    """The values in a config's text, as MMEngine writes it into checkpoints, without running the text.

    Assignments of anything but literals and `dict(...)` are passed over.
    """
    values = {}
    with suppress(SyntaxError, ValueError, RecursionError):
        for statement in ast.parse(text).body:
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                with suppress(ValueError):
                    values[statement.targets[0].id] = ast.literal_eval(_Literals().visit(statement.value))
    return values


class _Literals(ast.NodeTransformer):
    """`dict(a=1)` written as `{"a": 1}`."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        named = all(keyword.arg for keyword in node.keywords)
        if isinstance(node.func, ast.Name) and node.func.id == "dict" and named and not node.args:
            keys = [ast.Constant(keyword.arg) for keyword in node.keywords]
            return ast.Dict(keys, [keyword.value for keyword in node.keywords])
        return node


def describe(state_dict: Mapping[str, Tensor], config: Mapping[str, Any]) -> Description:
    """The network of these weights (this package's names) and its images, by the config that trained it.

    Raises:
        ValueError: the config does not say it, or is another network's.
    """
    weights = network(state_dict)
    backbone = config.get("model", {}).get("backbone", {})
    kernel = weights["backbone.patch_embed.projection.weight"]
    hidden = weights["backbone.layers.0.ffn.layers.1.weight"].shape[-1]
    depth = sum(name.endswith("attn.qkv.weight") for name in weights)
    arch = _architecture(backbone)
    found = dict(embed_dims=len(kernel), num_layers=depth, feedforward_channels=hidden)
    for name, value in found.items():
        if arch[name] != value:
            raise ValueError(f"the config's backbone has {name}={arch[name]}, the weights have {value}")
    img_size = _pair(backbone.get("img_size", 224))
    patches = weights["backbone.pos_embed"].shape[1] - ("backbone.cls_token" in weights)
    if math.prod(side // kernel.shape[-1] for side in img_size) != patches:
        raise ValueError(f"the config's images have {img_size} pixels, the weights are for {patches} patches")
    return Description(
        img_size=img_size,
        patch_size=kernel.shape[-1],
        num_heads=arch["num_heads"],
        pool="token" if backbone.get("out_type") == "cls_token" else "avg",
        **found,
        **_images(config, img_size),
    )


def _architecture(backbone: Mapping[str, Any]) -> Mapping[str, int]:
    arch = backbone.get("arch")
    if isinstance(arch, str):
        arch = VisionTransformer.arch_zoo.get(arch.lower())
    if not arch:
        raise ValueError("the config names no architecture of a ViT (`model.backbone.arch`)")
    return arch


def _images(config: Mapping[str, Any], img_size: tuple[int, int]) -> dict[str, Any]:
    """Mean, standard deviation and resizing that the config gives its images."""
    preprocessor = config.get("model", {}).get("data_preprocessor") or config.get("data_preprocessor") or {}
    if not preprocessor.get("mean") or not preprocessor.get("std"):
        raise ValueError("the config's `data_preprocessor` has no mean and std")
    if not (preprocessor.get("to_rgb") or preprocessor.get("bgr_to_rgb")):
        raise ValueError("the config's images are BGR (`data_preprocessor` without to_rgb=True)")
    images = dict(resize=min(img_size), interpolation="bicubic")
    for transform in _pipeline(config):
        kind = str(transform.get("type")).split(".")[-1]
        if kind == "ResizeEdge":
            images.update(resize=transform["scale"], interpolation=transform.get("interpolation", "bilinear"))
        elif kind == "EfficientNetCenterCrop":
            resize = transform["crop_size"] + transform.get("crop_padding", 32)
            images.update(resize=resize, interpolation=transform.get("interpolation", "bicubic"))
    for name in ("mean", "std"):
        images[name] = tuple(round(value / 255, 6) for value in preprocessor[name])
    return images


def _pipeline(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The transforms of the images that a trained network is shown."""
    loaders = (config.get(f"{split}_dataloader") for split in ("test", "val"))
    dataset = next(filter(None, loaders), {}).get("dataset", {})
    while "dataset" in dataset:  # a wrapper
        dataset = dataset["dataset"]
    yield from dataset.get("pipeline", ())


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


def timm_config(state_dict: Mapping[str, Tensor], description: Description) -> dict[str, Any]:
    """What timm's `create_model("local-dir:...")` reads in config.json; weights have this package's names.

    Raises:
        ValueError: a final norm and another after pooling, of which timm's network has one.
    """
    size, classes = _size(description), _num_classes(state_dict)
    return {
        "architecture": f"vit_{TIMM_NAMES.get(description.embed_dims, 'base')}_patch16_224",
        "num_classes": classes,
        "num_features": description.embed_dims,
        "global_pool": description.pool,
        "model_args": timm_arguments(state_dict, description),
        "pretrained_cfg": {
            "custom_load": False,
            "input_size": [3, *description.img_size],
            "fixed_input_size": True,
            "interpolation": description.interpolation,
            "crop_pct": description.crop_pct,
            "crop_mode": "center",
            "mean": description.mean,
            "std": description.std,
            "num_classes": classes,
            "pool_size": None,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }


def timm_arguments(state_dict: Mapping[str, Tensor], description: Description) -> dict[str, Any]:
    """Arguments of timm's `VisionTransformer` for these weights, without `num_classes`.

    Raises:
        ValueError: a final norm and another after pooling, of which timm's network has one.
    """
    weights = network(state_dict)
    final, pooled = "backbone.ln1.weight" in weights, "backbone.ln2.weight" in weights
    if final and pooled:
        raise ValueError("the weights have a final norm and one after pooling; timm's network has one of them")
    arguments = dict(
        img_size=_size(description),
        patch_size=description.patch_size,
        embed_dim=description.embed_dims,
        depth=description.num_layers,
        num_heads=description.num_heads,
        mlp_ratio=_ratio(description),
        init_values=0.1,
        class_token="backbone.cls_token" in weights,
        global_pool=description.pool,
        fc_norm=pooled,
    )
    return arguments if final or pooled else arguments | {"final_norm": False}


def hf_config(state_dict: Mapping[str, Tensor], description: Description) -> dict[str, Any]:
    """What Hugging Face's `AutoModel.from_pretrained` reads in config.json.

    Raises:
        ValueError: images that are not square, to which Dinov2's positions do not fit.
    """
    height, width = description.img_size
    if height != width:
        raise ValueError(f"the images have {height} x {width} pixels, Dinov2Model takes square ones")
    return {
        "model_type": "dinov2",
        "architectures": ["Dinov2Model"],
        "image_size": height,
        "patch_size": description.patch_size,
        "num_channels": 3,
        "hidden_size": description.embed_dims,
        "num_hidden_layers": description.num_layers,
        "num_attention_heads": description.num_heads,
        "mlp_ratio": _ratio(description),
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "layerscale_value": 0.1,
        "qkv_bias": True,
        "use_mask_token": "backbone.mask_token" in network(state_dict),
        "use_swiglu_ffn": False,
    }


def hf_preprocessor(description: Description) -> dict[str, Any]:
    """What Hugging Face's `AutoImageProcessor.from_pretrained` reads in preprocessor_config.json."""
    height, width = description.img_size
    return {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": description.resize},
        "resample": RESAMPLE[description.interpolation],
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": description.mean,
        "image_std": description.std,
    }


def write_timm_folder(folder: Path, state_dict: Mapping[str, Tensor], description: Description) -> None:
    """A folder for `timm.create_model("local-dir:FOLDER", pretrained=True)`."""
    config = timm_config(state_dict, description)
    write_weights(folder / "model.safetensors", mm_to_timm(state_dict), metadata(description))
    _write_json(folder / "config.json", config)


def write_hf_folder(folder: Path, state_dict: Mapping[str, Tensor], description: Description) -> None:
    """A folder for Hugging Face's `AutoModel` and `AutoImageProcessor`."""
    config, preprocessor = hf_config(state_dict, description), hf_preprocessor(description)
    write_weights(folder / "model.safetensors", mm_to_hf(state_dict), metadata(description))
    _write_json(folder / "config.json", config)
    _write_json(folder / "preprocessor_config.json", preprocessor)


FOLDERS = {"timm": write_timm_folder, "hf": write_hf_folder}


def metadata(description: Description) -> dict[str, str]:
    """A description as the texts that .safetensors takes."""
    return {name: json.dumps(value) for name, value in asdict(description).items()}


def _num_classes(state_dict: Mapping[str, Tensor]) -> int:
    return len(state_dict.get("head.fc.weight", ()))


def _size(description: Description) -> int | tuple[int, int]:
    height, width = description.img_size
    return height if height == width else (height, width)


def _ratio(description: Description) -> float:
    """A ratio whose product with the width, cut to a whole number, is the MLP's width."""
    ratio = description.feedforward_channels / description.embed_dims
    exact = int(description.embed_dims * ratio) == description.feedforward_channels
    return ratio if exact else (description.feedforward_channels + 0.5) / description.embed_dims


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    replace_file(path, (json.dumps(content, indent=2) + "\n").encode())
