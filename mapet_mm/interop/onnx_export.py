"""Export a backbone to ONNX, for any number of images of any size."""

import contextlib
import importlib.util
import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mapet_mm.interop.convert import network
from mapet_mm.interop.description import Description, config_of
from mapet_mm.interop.export import described
from mapet_mm.models import MaPeTViT
from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.errors import UserError

# What a backbone may have and the outputs do not depend on; the last is zero where there is a norm before.
NOT_EXPORTED = ("backbone.mask_token", "backbone.ln2.", "backbone.patch_embed.projection.bias")


class Features(nn.Module):
    """The class token and the patches' features of a ViT, without a branch on the images' size.

    Args:
        vit: with a class token; its `out_type` does not matter.
    """

    def __init__(self, vit: MaPeTViT) -> None:
        super().__init__()
        self.vit = vit
        self.eval()

    def forward(
        self, images: Float[Tensor, "batch channel height width"]
    ) -> tuple[Float[Tensor, "batch dim"], Float[Tensor, "batch dim rows columns"]]:
        """Outputs of the last layer, `(B, D)` and `(B, D, h, w)`, after the final norm if there is one."""
        vit = self.vit
        rows, columns = vit.patch_embed.projection.kernel_size
        height, width = images.shape[-2:]
        images = F.pad(images, (0, -width % columns, 0, -height % rows))  # to whole patches, as MMCV does
        grid = vit.patch_embed.projection(images)  # B D h w
        tokens = grid.flatten(2).transpose(1, 2) + self._positions(grid.shape[-2:])
        of_class = vit.cls_token + vit.pos_embed[:, :1]
        tokens = vit.pre_norm(torch.cat([of_class.expand(len(tokens), -1, -1), tokens], dim=1))
        for layer in vit.layers:
            tokens = layer(tokens)
        tokens = vit.ln1(tokens) if vit.final_norm else tokens
        return tokens[:, 0], tokens[:, 1:].transpose(1, 2).reshape(grid.shape)

    def _positions(self, size: torch.Size) -> Float[Tensor, "1 patch dim"]:
        """Position embeddings of the patches, resized as in MMPretrain; unchanged at their own size."""
        positions = self.vit.pos_embed[:, 1:].unflatten(1, self.vit.patch_resolution).permute(0, 3, 1, 2)
        positions = F.interpolate(positions, size=size, mode=self.vit.interpolate_mode, align_corners=False)
        return positions.flatten(2).transpose(1, 2)


def write_onnx(output: Path, state_dict: Mapping[str, Tensor], meta: Mapping[str, Any]) -> str:
    """Write the backbone as an ONNX file: `images` -> `class_token`, `patch_features`.

    Args:
        output: a .onnx file.
        state_dict: weights in this package's names.
        meta: metadata of their file; its `cfg`, the text of the training config, gives the architecture.

    Returns:
        Inputs and outputs of the file, in two lines.

    Raises:
        UserError: a package that the export needs is not installed.
        ValueError: `output` does not end in .onnx, or the architecture of the weights is not known.
    """
    if missing := [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]:
        raise UserError(f"ONNX needs {' and '.join(missing)}: pip install 'mapet_mm[onnx]'")
    if output.suffix != ".onnx":
        raise ValueError(f"ONNX goes to a .onnx file, not to {output}")
    weights = network(state_dict)
    description = described(weights, meta)
    resizing = config_of(meta["cfg"])["model"]["backbone"].get("interpolate_mode", "bicubic")
    features = Features(_backbone(weights, description, resizing))
    side = description.patch_size
    images = torch.zeros(2, 3, 2 * side, 3 * side)  # distinct sizes, so that none becomes a constant
    written = io.BytesIO()
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about PyTorch's own calls
        torch.onnx.export(
            features,
            (images,),
            input_names=["images"],
            output_names=["class_token", "patch_features"],
            dynamic_shapes=({0: "batch", 2: "height", 3: "width"},),
            dynamo=True,
            verbose=False,
        ).save(written)
    replace_file(output, written.getvalue())
    return (
        "inputs: images (B, 3, H, W); outputs: class_token (B, D), patch_features (B, D, h, w)\n"
        f"{description}; any other number and size too"
    )


def _backbone(weights: Mapping[str, Tensor], description: Description, interpolate_mode: str) -> MaPeTViT:
    if "backbone.cls_token" not in weights:
        raise ValueError("the backbone has no class token, which is one of the outputs")
    grid = [side // description.patch_size for side in description.img_size]
    vit = MaPeTViT(
        arch=dict(
            embed_dims=description.embed_dims,
            num_layers=description.num_layers,
            num_heads=description.num_heads,
            feedforward_channels=description.feedforward_channels,
        ),
        img_size=description.img_size,
        patch_size=description.patch_size,
        final_norm="backbone.ln1.weight" in weights,
        pre_norm="backbone.pre_norm.weight" in weights,
        interpolate_mode=interpolate_mode,
        pretrained_grid=grid,
    )
    named = {f"backbone.{name}": name for name in vit.state_dict()}
    for name in weights:
        if name.startswith("backbone.") and name not in named and not name.startswith(NOT_EXPORTED):
            raise ValueError(f"`{name}`: MaPeTViT has nothing of this name")
    vit.load_state_dict({own: weights[name] for name, own in named.items()})
    return vit
