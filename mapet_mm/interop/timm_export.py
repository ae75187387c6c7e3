"""What timm needs besides the weights: arguments of its `VisionTransformer`, and a folder's config.json."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mapet_mm.interop.convert import CLASS_TOKEN, FINAL_NORM, num_classes_of, sizes_of
from mapet_mm.interop.description import Description, Preparation
from mapet_mm.models.backbones.checkpoint_hooks import SCALED

POOLED_NORM = "backbone.ln2.weight"
# timm's names for widths; of another width the name does not matter, because `model_args` say everything.
SIZES = {192: "tiny", 384: "small", 768: "base", 1024: "large"}


def timm_arguments(weights: Mapping[str, Tensor], description: Description) -> dict[str, Any]:
    """Arguments of timm's `VisionTransformer` for these weights, without `num_classes`.

    Raises:
        ValueError: the weights have both a final norm and a norm after pooling, or a classifier of a feature
            that timm's network does not classify.
    """
    has_final_norm = FINAL_NORM in weights
    has_pooled_norm = POOLED_NORM in weights
    if has_final_norm and has_pooled_norm:
        raise ValueError(
            "the weights have a final norm and one after pooling; timm's network has one of them"
        )
    sizes = sizes_of(weights)
    arguments = dict(
        img_size=_side_or_sides(description),
        patch_size=description.patch_size,
        embed_dim=sizes["embed_dims"],
        depth=sizes["num_layers"],
        num_heads=description.num_heads,
        mlp_ratio=mlp_ratio(sizes["embed_dims"], sizes["feedforward_channels"]),
        init_values=0.1 if any(name.endswith(tuple(SCALED)) for name in weights) else None,
        class_token=CLASS_TOKEN in weights,
        global_pool=_global_pool(weights, description),
        fc_norm=has_pooled_norm,
    )
    if not has_final_norm and not has_pooled_norm:
        arguments["final_norm"] = False
    return arguments


def timm_call(weights: Mapping[str, Tensor], description: Description) -> str:
    """The Python expression that makes timm's network for these weights."""
    arguments = timm_arguments(weights, description)
    arguments["num_classes"] = num_classes_of(weights)
    listed = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"timm.models.VisionTransformer({listed})"


def timm_config(weights: Mapping[str, Tensor], description: Description) -> dict[str, Any]:
    """The content of config.json for timm's `create_model("local-dir:...")`."""
    arguments = timm_arguments(weights, description)
    num_classes = num_classes_of(weights)
    return {
        "architecture": f"vit_{SIZES.get(arguments['embed_dim'], 'base')}_patch16_224",
        "num_classes": num_classes,
        "num_features": arguments["embed_dim"],
        "global_pool": arguments["global_pool"],
        "model_args": arguments,
        "pretrained_cfg": pretrained_config(description, num_classes),
    }


def pretrained_config(preparation: Preparation, num_classes: int = 0) -> dict[str, Any]:
    """timm's description of a ViT's images."""
    return {
        "input_size": [3, *preparation.img_size],
        "fixed_input_size": True,
        "interpolation": preparation.interpolation,
        "crop_pct": preparation.crop_pct,
        "crop_mode": "squash" if preparation.is_squashed else "center",
        "mean": preparation.mean,
        "std": preparation.std,
        "num_classes": num_classes,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }


def _global_pool(weights: Mapping[str, Tensor], description: Description) -> str:
    """timm's name for the feature that the classifier reads; the mean of the patches without a classifier."""
    if not num_classes_of(weights):
        return "avg"
    if description.feature == "avg_featmap":
        return "avg"
    if description.feature == "cls_token":
        return "avg" if POOLED_NORM in weights else "token"
    raise ValueError(
        f"the config classifies {description.feature}, other libraries the last layer's "
        "cls_token or avg_featmap"
    )


def mlp_ratio(width: int, inner_width: int) -> float:
    """The ratio that gives `inner_width` although timm truncates its product with the width."""
    ratio = inner_width / width
    if int(width * ratio) == inner_width:
        return ratio
    return (inner_width + 0.5) / width


def _side_or_sides(description: Description) -> int | tuple[int, int]:
    height, width = description.img_size
    return height if height == width else (height, width)
