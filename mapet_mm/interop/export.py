"""Export weights to timm, Hugging Face, torchvision and ONNX, with the files that describe the network."""

import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mapet_mm.interop.convert import CLASS_TOKEN, FINAL_NORM, FROM_MM, mm_to_timm, network, sizes_of
from mapet_mm.interop.description import ENTRY, INTERPOLATIONS, Description, read_description
from mapet_mm.models.backbones.checkpoint_hooks import SCALED, fold_layer_scale
from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.errors import UserError
from mapet_mm.weight_files import write_weights

TIMM_NAMES = {192: "tiny", 384: "small", 768: "base", 1024: "large"}
POOLED_NORM = "backbone.ln2.weight"


def write_export(
    output: Path, target: str, state_dict: Mapping[str, Tensor], meta: Mapping[str, Any], fold: bool = False
) -> str:
    """Write weights under another library's names, with the files that it needs.

    Args:
        output: a .safetensors or .pth file; for timm and Hugging Face also a folder that they load without
            further arguments; for ONNX an .onnx file.
        target: 'mm' | 'reference' | 'timm' | 'hf' | 'torchvision' | 'onnx'.
        state_dict: weights under this package's names.
        meta: metadata of the weights' file, with the description of its network and images.
        fold: for timm, fold LayerScale into the layers before it; for torchvision this is always done.

    Returns:
        Lines about how to load `output`.

    Raises:
        ValueError: the weights do not fit the other network, or a folder's content is not known.
    """
    to_folder = output.is_dir() or not output.suffix
    if to_folder and target not in ("timm", "hf"):
        raise ValueError(f"names of {target} go to a file, not to the folder {output}")
    if fold and target not in ("timm", "torchvision"):
        raise ValueError(f"--fold-layerscale is for timm and torchvision, not for names of {target}")
    if target == "mm":
        kept = {name: meta[name] for name in ("cfg", "dataset_meta", ENTRY) if name in meta}
        write_weights(output, state_dict, kept)
        return ""
    weights = network(state_dict)
    weights = fold_layer_scale(weights) if fold else weights
    named = {} if target == "onnx" else FROM_MM[target](weights)
    if fold:  # FROM_MM fills in a LayerScale of ones
        named = {name: v for name, v in named.items() if not name.endswith((".ls1.gamma", ".ls2.gamma"))}
    try:
        description = read_description(meta)
        description.check(weights)
    except ValueError as error:
        if to_folder or target == "onnx":
            raise
        write_weights(output, named)
        return str(error)
    if target == "onnx":
        _write_onnx(output, weights, description)
        outputs = "class_token (B, D), patch_features (B, D, h, w)"
        return f"inputs: images (B, 3, H, W); outputs: {outputs}\n{description}"
    configs, call = {}, ""
    if target == "timm":
        configs["config.json"] = _timm_config(weights, description)
        arguments = configs["config.json"]["model_args"] | {"num_classes": _num_classes(weights)}
        call = f"timm.models.VisionTransformer({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"
        call = f'timm.create_model("local-dir:{output}", pretrained=True)' if to_folder else call
    elif to_folder:
        configs["config.json"] = _hf_config(weights, description)
        configs["preprocessor_config.json"] = _hf_preprocessor(description)
        call = f'transformers.AutoModel.from_pretrained("{output}")'
    file = output / "model.safetensors" if to_folder else output
    write_weights(file, named, {ENTRY: asdict(description)})
    for name, content in configs.items() if to_folder else ():
        replace_file(output / name, (json.dumps(content, indent=2) + "\n").encode())
    return f"{call}\n{description}".strip()


def timm_arguments(weights: Mapping[str, Tensor], description: Description) -> dict[str, Any]:
    """Arguments of timm's `VisionTransformer` for these weights, without `num_classes`.

    Raises:
        ValueError: the weights have both a final norm and a norm after pooling, or a classifier of a feature
            that timm's network does not classify.
    """
    final, pooled = FINAL_NORM in weights, POOLED_NORM in weights
    if final and pooled:
        raise ValueError(
            "the weights have a final norm and one after pooling; timm's network has one of them"
        )
    pool = "avg"  # of the patches, for a backbone alone
    if _num_classes(weights):
        pools = {"avg_featmap": "avg", "cls_token": "avg" if pooled else "token"}
        if description.feature not in pools:
            raise ValueError(
                f"the config classifies {description.feature}, other libraries the last layer's "
                "cls_token or avg_featmap"
            )
        pool = pools[description.feature]
    sizes = sizes_of(weights)
    width, inner = sizes["embed_dims"], sizes["feedforward_channels"]
    ratio = inner / width
    arguments = dict(
        img_size=_size(description),
        patch_size=description.patch_size,
        embed_dim=width,
        depth=sizes["num_layers"],
        num_heads=description.num_heads,
        # timm truncates the product of ratio and width
        mlp_ratio=ratio if int(width * ratio) == inner else (inner + 0.5) / width,
        init_values=0.1 if any(name.endswith(tuple(SCALED)) for name in weights) else None,
        class_token=CLASS_TOKEN in weights,
        global_pool=pool,
        fc_norm=pooled,
    )
    return arguments if final or pooled else arguments | {"final_norm": False}


def _timm_config(weights: Mapping[str, Tensor], description: Description) -> dict[str, Any]:
    """The content of config.json for timm's `create_model("local-dir:...")`."""
    classes, arguments = _num_classes(weights), timm_arguments(weights, description)
    return {
        "architecture": f"vit_{TIMM_NAMES.get(arguments['embed_dim'], 'base')}_patch16_224",
        "num_classes": classes,
        "num_features": arguments["embed_dim"],
        "global_pool": arguments["global_pool"],
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [3, *description.img_size],
            "fixed_input_size": True,
            "interpolation": description.interpolation,
            "crop_pct": description.crop_pct,
            "crop_mode": "squash" if description.resize is None else "center",
            "mean": description.mean,
            "std": description.std,
            "num_classes": classes,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }


def _hf_config(weights: Mapping[str, Tensor], description: Description) -> dict[str, Any]:
    """The content of config.json for Hugging Face's `AutoModel.from_pretrained`.

    Raises:
        ValueError: images are not square, or the MLP's width is no multiple of the tokens' width.
    """
    height, width = description.img_size
    sizes = sizes_of(weights)
    ratio, rest = divmod(sizes["feedforward_channels"], sizes["embed_dims"])
    if rest or height != width:
        raise ValueError(
            "Dinov2Model takes square images and an MLP whose width is a multiple of the tokens'; these are "
            f"{height} x {width} pixels and {sizes['feedforward_channels']} of {sizes['embed_dims']}"
        )
    return {
        "model_type": "dinov2",
        "architectures": ["Dinov2Model"],
        "image_size": height,
        "patch_size": description.patch_size,
        "hidden_size": sizes["embed_dims"],
        "num_hidden_layers": sizes["num_layers"],
        "num_attention_heads": description.num_heads,
        "mlp_ratio": ratio,
        "layer_norm_eps": 1e-6,
        "use_mask_token": "backbone.mask_token" in weights,
    }


def _hf_preprocessor(description: Description) -> dict[str, Any]:
    """The content of preprocessor_config.json for Hugging Face's `AutoImageProcessor.from_pretrained`."""
    height, width = description.img_size
    whole = {"height": height, "width": width}
    return {
        "image_processor_type": "BitImageProcessor",
        "size": whole if description.resize is None else {"shortest_edge": description.resize},
        "resample": INTERPOLATIONS[description.interpolation],
        "crop_size": whole,
        "image_mean": description.mean,
        "image_std": description.std,
    }


def _num_classes(weights: Mapping[str, Tensor]) -> int:
    return len(weights.get("head.fc.weight", ()))


def _size(description: Description) -> int | tuple[int, int]:
    height, width = description.img_size
    return height if height == width else (height, width)


class Features(nn.Module):
    """The class token and the patches' features of a ViT of timm, as the ONNX file gives them.

    Args:
        vit: timm's `VisionTransformer` with a class token.
        grid: rows and columns of patches.
    """

    def __init__(self, vit: nn.Module, grid: tuple[int, int]) -> None:
        super().__init__()
        self.vit, self.grid = vit, grid

    def forward(
        self, images: Float[Tensor, "batch 3 height width"]
    ) -> tuple[Float[Tensor, "batch dim"], Float[Tensor, "batch dim rows columns"]]:
        """Outputs of the last layer, (B, D) and (B, D, h, w), after the final norm if there is one."""
        tokens = self.vit.forward_features(images)
        return tokens[:, 0], tokens[:, 1:].transpose(1, 2).unflatten(2, self.grid)  # B N D -> B D h w


def _write_onnx(output: Path, weights: Mapping[str, Tensor], description: Description) -> None:
    """Write the network that timm has for these weights as an ONNX file, for any number of images."""
    import timm

    if output.suffix != ".onnx" or CLASS_TOKEN not in weights:
        raise ValueError(f"ONNX takes a backbone with a class token, and an .onnx file, not {output}")
    backbone = {name: value for name, value in weights.items() if not name.startswith("head.")}
    vit = timm.models.VisionTransformer(**timm_arguments(backbone, description), num_classes=0).eval()
    vit.load_state_dict(mm_to_timm(backbone))
    grid = tuple(side // description.patch_size for side in description.img_size)
    content = io.BytesIO()
    try:
        torch.onnx.export(
            Features(vit, grid).eval(),
            (torch.zeros(2, 3, *description.img_size),),
            input_names=["images"],
            output_names=["class_token", "patch_features"],
            dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),  # with a name, PyTorch 2.6 fixes the number
            dynamo=True,
            verbose=False,
        ).save(content)
    except ImportError as error:
        raise UserError(f"ONNX needs onnx and onnxscript: pip install 'mapet_mm[onnx]' ({error})") from None
    replace_file(output, content.getvalue())
