"""What Hugging Face needs besides the weights: the two configurations of a folder."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mapet_mm.interop.convert import sizes_of
from mapet_mm.interop.description import INTERPOLATIONS, Description, Preparation


def hf_config(weights: Mapping[str, Tensor], description: Description) -> dict[str, Any]:
    """The content of config.json for Hugging Face's `AutoModel.from_pretrained`.

    Raises:
        ValueError: images are not square, or the MLP's width is not a multiple of the tokens' width.
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


def hf_preprocessor(description: Preparation) -> dict[str, Any]:
    """The content of preprocessor_config.json for Hugging Face's `AutoImageProcessor.from_pretrained`."""
    height, width = description.img_size
    whole = {"height": height, "width": width}
    size = whole
    if isinstance(description.resize, int):
        size = {"shortest_edge": description.resize}
    elif description.resize is not None:
        size = dict(zip(("height", "width"), description.resize, strict=True))
    return {
        "image_processor_type": "BitImageProcessor",
        "size": size,
        "resample": INTERPOLATIONS[description.interpolation],
        "crop_size": whole,
        "image_mean": description.mean,
        "image_std": description.std,
    }
