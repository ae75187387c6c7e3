"""Models of timm, Hugging Face and torchvision, and how they take images, as their library states it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from mapet_mm.evaluation.checkpoint_weights import fill_missing
from mapet_mm.interop.description import INTERPOLATIONS, Preparation


def _timm(name: str, with_weights: bool, side: int | None) -> tuple[nn.Module, Preparation, list[str]]:
    """A model of timm, and what its `pretrained_cfg` says."""
    import timm

    model = timm.create_model(name, pretrained=with_weights)
    if side and hasattr(model, "set_input_size"):  # position embeddings of one size
        model.set_input_size(img_size=side)
    known = timm.data.resolve_model_data_config(model)
    resize, crop = timm.data.create_transform(**known).transforms[:2]
    crop_size = tuple(crop.size)
    resize_size = getattr(resize, "size", None)
    is_short_side = isinstance(resize_size, int)
    is_squashed = type(resize_size) in (list, tuple) and tuple(resize_size) == crop_size
    if type(resize).__name__ != "Resize" or not (is_short_side or is_squashed):
        raise ValueError(f"images are prepared by {resize} and {crop}, which is not supported")
    prepared = Preparation(
        img_size=crop_size,
        mean=tuple(known["mean"]),
        std=tuple(known["std"]),
        resize=resize_size if is_short_side else None,
        interpolation=known["interpolation"],
    )
    return model, prepared, []


def _hugging_face(
    name: str, with_weights: bool, side: int | None
) -> tuple[nn.Module, Preparation, list[str]]:
    """A model of Hugging Face, what its image processor says, and weights that its files lack, then NaN."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(name)
    missing = []
    if with_weights:
        model, found = transformers.AutoModel.from_pretrained(name, output_loading_info=True)
        missing = sorted(found["missing_keys"])
        fill_missing(model, missing)
    else:
        model = transformers.AutoModel.from_config(config)
    model = getattr(model, "vision_model", model)
    known = transformers.AutoImageProcessor.from_pretrained(name).to_dict()
    return model, _processor_preparation(known, model.config.image_size), missing


def _processor_preparation(known: Mapping[str, Any], side: int) -> Preparation:
    """What an image processor of Hugging Face says; `side` is that of the model's images."""
    crop = known.get("crop_size") if known.get("do_center_crop") else known["size"]
    img_size = (crop["height"], crop["width"]) if "height" in crop else (side, side)
    mean = tuple(known["image_mean"])
    std = tuple(known["image_std"])
    if not known.get("do_normalize", True):
        mean = (0.0, 0.0, 0.0)
        std = (1.0, 1.0, 1.0)
    names = {number: name for name, number in INTERPOLATIONS.items()}
    return Preparation(img_size, mean, std, known["size"].get("shortest_edge"), names[int(known["resample"])])


def _torchvision(name: str, with_weights: bool, side: int | None) -> tuple[nn.Module, Preparation, list[str]]:
    """A model of torchvision, and what its weights' transforms say."""
    from torchvision import models

    name, _, tag = name.partition(":")
    weights = models.get_model_weights(name)[tag or "DEFAULT"]
    options = {"image_size": side} if side and name.startswith("vit") else {}
    model = models.get_model(name, weights=weights if with_weights else None, **options)
    known = weights.transforms()
    (crop,), (resize,) = known.crop_size, known.resize_size
    prepared = Preparation(
        (crop, crop), tuple(known.mean), tuple(known.std), resize, known.interpolation.value
    )
    return model, prepared, []


LIBRARIES = {"timm": _timm, "hf": _hugging_face, "torchvision": _torchvision}
