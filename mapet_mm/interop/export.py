"""Export weights to timm and Hugging Face, with the files that describe architecture and preprocessing."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mapet_mm.interop.convert import FROM_MM, mm_to_hf, network
from mapet_mm.interop.description import INTERPOLATIONS, Description, config_of, describe, metadata
from mapet_mm.interop.torchvision_names import fold_layer_scale, has_layer_scale
from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.weight_files import write_weights

TIMM_NAMES = {192: "tiny", 384: "small", 768: "base", 1024: "large"}


def timm_config(weights: Mapping[str, Tensor], description: Description) -> dict[str, Any]:
    """What timm's `create_model("local-dir:...")` reads in config.json.

    Raises:
        ValueError: the weights have both a final norm and a norm after pooling; timm's network has only one.
    """
    classes = _num_classes(weights)
    return {
        "architecture": f"vit_{TIMM_NAMES.get(description.embed_dims, 'base')}_patch16_224",
        "num_classes": classes,
        "num_features": description.embed_dims,
        "global_pool": description.pool,
        "model_args": timm_arguments(weights, description),
        "pretrained_cfg": {
            "custom_load": False,
            "input_size": [3, *description.img_size],
            "fixed_input_size": True,
            "interpolation": description.interpolation,
            "crop_pct": description.crop_pct,
            "crop_mode": "squash" if description.resize is None else "center",
            "mean": description.mean,
            "std": description.std,
            "num_classes": classes,
            "pool_size": None,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }


def timm_arguments(weights: Mapping[str, Tensor], description: Description) -> dict[str, Any]:
    """Arguments of timm's `VisionTransformer` for these weights, without `num_classes`.

    Raises:
        ValueError: the weights have both a final norm and a norm after pooling; timm's network has only one.
    """
    final, pooled = "backbone.ln1.weight" in weights, "backbone.ln2.weight" in weights
    if final and pooled:
        raise ValueError(
            "the weights have a final norm and one after pooling; timm's network has one of them"
        )
    arguments = dict(
        img_size=_size(description),
        patch_size=description.patch_size,
        embed_dim=description.embed_dims,
        depth=description.num_layers,
        num_heads=description.num_heads,
        mlp_ratio=_ratio(description),
        init_values=0.1 if has_layer_scale(weights) else None,
        class_token="backbone.cls_token" in weights,
        global_pool=description.pool,
        fc_norm=pooled,
    )
    return arguments if final or pooled else arguments | {"final_norm": False}


def torchvision_call(weights: Mapping[str, Tensor], description: Description) -> str:
    """The call that makes torchvision's `VisionTransformer` for these weights."""
    arguments = dict(
        image_size=_size(description),
        patch_size=description.patch_size,
        num_layers=description.num_layers,
        num_heads=description.num_heads,
        hidden_dim=description.embed_dims,
        mlp_dim=description.feedforward_channels,
    )
    if not isinstance(arguments["image_size"], int):
        raise ValueError(f"torchvision's ViT takes square images, these are {arguments['image_size']}")
    if classes := _num_classes(weights):
        arguments["num_classes"] = classes
    norm = "norm_layer=functools.partial(torch.nn.LayerNorm, eps=1e-6)"
    told = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"torchvision.models.VisionTransformer({told}, {norm})"


def hf_config(weights: Mapping[str, Tensor], description: Description) -> dict[str, Any]:
    """What Hugging Face's `AutoModel.from_pretrained` reads in config.json.

    Raises:
        ValueError: images are not square, or the MLP's width is no multiple of the tokens' width.
    """
    height, width = description.img_size
    ratio, rest = divmod(description.feedforward_channels, description.embed_dims)
    if rest:
        raise ValueError("the MLP's width is no multiple of the tokens', as Dinov2Model has it")
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
        "mlp_ratio": ratio,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "layerscale_value": 0.1,
        "qkv_bias": True,
        "use_mask_token": "backbone.mask_token" in weights,
        "use_swiglu_ffn": False,
    }


def hf_preprocessor(description: Description) -> dict[str, Any]:
    """What Hugging Face's `AutoImageProcessor.from_pretrained` reads in preprocessor_config.json."""
    height, width = description.img_size
    whole = {"height": height, "width": width}
    return {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": whole if description.resize is None else {"shortest_edge": description.resize},
        "resample": INTERPOLATIONS[description.interpolation],
        "do_center_crop": True,
        "crop_size": whole,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": description.mean,
        "image_std": description.std,
    }


def write_timm_folder(folder: Path, weights: Mapping[str, Tensor], description: Description) -> None:
    """Write a folder for `timm.create_model("local-dir:FOLDER", pretrained=True)`."""
    config = timm_config(weights, description)
    write_weights(folder / "model.safetensors", _named("timm", weights), metadata(description))
    _write_json(folder / "config.json", config)


def write_hf_folder(folder: Path, weights: Mapping[str, Tensor], description: Description) -> None:
    """Write a folder for Hugging Face's `AutoModel` and `AutoImageProcessor`."""
    config, preprocessor = hf_config(weights, description), hf_preprocessor(description)
    write_weights(folder / "model.safetensors", mm_to_hf(weights), metadata(description))
    _write_json(folder / "config.json", config)
    _write_json(folder / "preprocessor_config.json", preprocessor)


FOLDERS = {"timm": write_timm_folder, "hf": write_hf_folder}


def _num_classes(weights: Mapping[str, Tensor]) -> int:
    return len(weights.get("head.fc.weight", ()))


def _size(description: Description) -> int | tuple[int, int]:
    height, width = description.img_size
    return height if height == width else (height, width)


def _ratio(description: Description) -> float:
    """A ratio whose product with the tokens' width, truncated to an integer, is the MLP's width."""
    ratio = description.feedforward_channels / description.embed_dims
    exact = int(description.embed_dims * ratio) == description.feedforward_channels
    return ratio if exact else (description.feedforward_channels + 0.5) / description.embed_dims


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    replace_file(path, (json.dumps(content, indent=2) + "\n").encode())


def write_export(
    output: Path, target: str, state_dict: Mapping[str, Tensor], meta: Mapping[str, Any], fold: bool = False
) -> str:
    """Write weights under another library's names, with the files that it needs.

    Args:
        output: a .safetensors or .pth file, or, for timm and Hugging Face, a folder that they load without
            further arguments.
        target: 'mm' | 'reference' | 'timm' | 'hf' | 'torchvision'.
        state_dict: weights under this package's names.
        meta: metadata of the weights' file; its `cfg`, the text of the training's config, gives architecture,
            mean and standard deviation.
        fold: for timm, fold LayerScale into the layers before it; for torchvision this is always done.

    Returns:
        Lines about how to load `output`.

    Raises:
        ValueError: the weights do not fit the other network, or the content of a folder's files is not known.
    """
    to_folder = output.is_dir() or not output.suffix
    if to_folder and target not in FOLDERS:
        raise ValueError(f"names of {target} go to a .safetensors or .pth file, not to the folder {output}")
    if target == "mm" and not fold:
        kept = {name: meta[name] for name in ("cfg", "dataset_meta") if name in meta}
        write_weights(output, state_dict, kept)
        return ""
    weights = network(state_dict)
    if fold and target == "timm":
        weights = fold_layer_scale(weights)
    elif fold and target != "torchvision":
        raise ValueError(f"--fold-layerscale is for timm and torchvision, not for names of {target}")
    try:
        description = described(weights, meta)
    except ValueError as error:
        if to_folder:
            raise
        write_weights(output, _named(target, weights))
        return str(error)
    call = _call(output, to_folder, target, weights, description)
    if to_folder:
        FOLDERS[target](output, weights, description)
    else:
        write_weights(output, _named(target, weights), metadata(description))
    return f"{call}\n{description}".strip()


def described(weights: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Description:
    """`describe` by the config that a checkpoint's `meta` holds.

    Raises:
        ValueError: the config, which can have any form, does not say it.
    """
    try:
        return describe(weights, config_of(meta.get("cfg", "")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error if isinstance(error, ValueError) else f"the config has another form: {error!r}"
        raise ValueError(
            f"architecture, mean and std are not known ({reason}): give the training's config (--config)"
        ) from error


def _named(target: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under the target's names; folded weights do not get a LayerScale of ones."""
    named = FROM_MM[target](weights)
    if target == "timm" and not has_layer_scale(weights):
        named = {
            name: value for name, value in named.items() if not name.endswith((".ls1.gamma", ".ls2.gamma"))
        }
    return named


def _call(
    output: Path, to_folder: bool, target: str, weights: Mapping[str, Tensor], description: Description
) -> str:
    """The call that makes the network for these weights."""
    if target == "reference":
        return ""
    if target == "timm" and to_folder:
        return f'timm.create_model("local-dir:{output}", pretrained=True)'
    if target == "hf" and to_folder:
        return f'transformers.AutoModel.from_pretrained("{output}")'
    if target == "hf":
        return "transformers reads it as model.safetensors beside a config.json: give a folder to get both"
    if target == "torchvision":
        head = "" if _num_classes(weights) else "; vit.heads = torch.nn.Identity()"
        return f"vit = {torchvision_call(weights, description)}{head}"
    arguments = timm_arguments(weights, description) | {"num_classes": _num_classes(weights)}
    return f"timm.models.VisionTransformer({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"
