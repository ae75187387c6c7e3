"""Weights of other origin as initial weights of a pre-training: MAE, DeiT, DINOv2, timm, Hugging Face."""

from collections.abc import Mapping

from torch import Tensor

from mapet_mm.interop.convert import TO_MM

# Parts of pre-trained models besides the encoder, and heads of classifiers.
DECODERS = ("decoder", "mask_token", "head.", "fc.", "classifier.", "pooler.")


def as_start(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """The backbone's weights under this package's names, and a line that says what was done.

    Args:
        weights: a plain ViT's, under the names of this package, timm (MAE's, DeiT's and DINO's files have
            these), Hugging Face or the authors; heads and decoders are left out.

    Raises:
        ValueError: the weights fit none of these; the message gives the reason for each.
    """
    weights = {name.removeprefix("module."): value for name, value in weights.items()}
    reasons = []
    for origin in ("mm", "timm", "hf", "reference"):
        left_out = DECODERS if origin in ("timm", "hf") else ()
        kept = {name: value for name, value in weights.items() if not name.startswith(left_out)}
        try:
            ours = TO_MM[origin](kept)
        except ValueError as error:
            reasons.append(f"{origin}: {error}")
            continue
        backbone = {name: value for name, value in ours.items() if name.startswith("backbone.")}
        if "backbone.layers.0.ln1.weight" in backbone:
            left = sorted({name.split(".")[0] for name in weights.keys() - kept.keys()})
            return backbone, f"names of {origin}" + (f", without {', '.join(left)}" if left else "")
    raise ValueError(f"these are no weights of a plain ViT ({'; '.join(reasons)})")
