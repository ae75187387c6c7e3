"""The methods of `mapet-mm pretrain`."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """What differs between methods before a config is made.

    Args:
        recipe: pattern of its recipes in configs/, for a size of the ViT.
        start_words: a line for the start; empty for the paper's method.
        verdict_words: a sentence for the verdict; likewise.
        has_tokens: False if there is neither a tokenizer nor a codebook.
        without: options that mean nothing.
        warm_up: the share of the epochs that warms up, as a divisor.
    """

    recipe: str
    start_words: str = ""
    verdict_words: str = ""
    has_tokens: bool = True
    without: Sequence[str] = ()
    warm_up: int = 30  # the paper's ten of 300


METHODS = {
    "mapet": Method("mapet/mapet_vit-{}-p16_kclip_*_in1k.py"),
    "visible-mim": Method(
        "visible_mim/visible-mim_vit-{}-p16_kclip_*_in1k.py",
        "method: VisibleMIM, an extension: the ViT sees half of an image, a predictor the rest",
        "The method is VisibleMIM, an extension: in small trials its frozen features beat MaPeT's on images "
        "like those of its training, and on others were behind MIM's (docs/extensions.md).",
    ),
    "mae": Method(
        "mae/mae_vit-{}-p16_*_in1k.py",
        "method: MAE, MMPretrain's: the ViT sees a quarter of an image, a decoder predicts the pixels of the "
        "rest; there are no tokens",
        "The method is MMPretrain's MAE, which predicts pixels.",
        has_tokens=False,
        without=("init", "tokenizer", "teacher_bands", "teacher_images"),
        warm_up=20,  # its paper's 40 of 800
    ),
}
