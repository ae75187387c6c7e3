"""The backbone as an ONNX file: class token and map of features of timm's network for its weights."""

import io
from collections.abc import Mapping
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mapet_mm.interop.convert import CLASS_TOKEN, mm_to_timm
from mapet_mm.interop.description import Description
from mapet_mm.interop.networks import timm_config
from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.errors import UserError

INPUTS = ["images"]
OUTPUTS = ["class_token", "patch_features"]
SHAPES = "inputs: images (B, 3, H, W); outputs: class_token (B, D), patch_features (B, D, h, w)"


class Features(nn.Module):
    """The class token and the patches' features of a ViT of timm, as the ONNX file gives them.

    Args:
        vit: timm's `VisionTransformer` with a class token.
        grid: rows and columns of patches.
    """

    def __init__(self, vit: nn.Module, grid: tuple[int, int]) -> None:
        super().__init__()
        self.vit = vit
        self.grid = grid

    def forward(
        self, images: Float[Tensor, "batch 3 height width"]
    ) -> tuple[Float[Tensor, "batch dim"], Float[Tensor, "batch dim rows columns"]]:
        """Outputs of the last layer, (B, D) and (B, D, h, w), after the final norm if there is one."""
        tokens = self.vit.forward_features(images)
        patches = tokens[:, 1:].transpose(1, 2)  # B N D -> B D N
        return tokens[:, 0], patches.unflatten(2, self.grid)  # B D N -> B D h w


def write_onnx(output: Path, weights: Mapping[str, Tensor], description: Description) -> None:
    """Write the network that timm has for these weights as an ONNX file, for any number of images.

    Raises:
        ValueError: the weights have no class token, or the file is not called .onnx.
        UserError: onnx or onnxscript is missing.
    """
    import timm

    if output.suffix != ".onnx" or CLASS_TOKEN not in weights:
        raise ValueError(f"ONNX takes a backbone with a class token, and an .onnx file, not {output}")
    backbone = {name: value for name, value in weights.items() if not name.startswith("head.")}
    arguments = timm_config(backbone, description)["model_args"]
    vit = timm.models.VisionTransformer(**arguments, num_classes=0).eval()
    vit.load_state_dict(mm_to_timm(backbone))
    grid = tuple(side // description.patch_size for side in description.img_size)
    content = io.BytesIO()
    try:
        program = torch.onnx.export(
            Features(vit, grid).eval(),
            (torch.zeros(2, description.num_bands, *description.img_size),),
            input_names=INPUTS,
            output_names=OUTPUTS,
            dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),  # with a name, PyTorch 2.6 fixes the number
            dynamo=True,
            verbose=False,
        )
        program.save(content)
    except ImportError as error:
        raise UserError(f"ONNX needs onnx and onnxscript: pip install 'mapet_mm[onnx]' ({error})") from None
    replace_file(output, content.getvalue())
