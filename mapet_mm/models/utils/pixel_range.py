"""Images with values from 0 to 1 or from 0 to 255, and a mean and standard deviation for the others."""

from __future__ import annotations

from torch import Tensor, nn

from mapet_mm.utils.errors import UserError


class PixelRangeError(UserError, ValueError):
    """Images and the numbers that normalise them have different ranges."""


def check_pixel_range(images: Tensor, mean: Tensor | None, std: Tensor | None) -> None:
    """Refuse images from 0 to 1 with a `mean` for 0 to 255, and the other way round.

    Either runs, and learns badly: all pixels look nearly the same, or are hundreds of deviations off.
    """
    if mean is None or std is None or not images.numel():
        return
    low, high = images.min().item(), images.max().item()
    if images.is_floating_point() and low >= 0 and 0 < high <= 1 and mean.max() > 2:
        raise PixelRangeError(
            "the images have values from 0 to 1, and the data preprocessor's `mean` is for 0 to 255: leave "
            "out the pipeline's step that divides by 255 (ToTensor), or divide `mean` and `std` by 255"
        )
    if high > 2 and std.max() < 1:
        raise PixelRangeError(
            f"the images have values up to {high:g}, and the data preprocessor's `std` is for 0 to 1: "
            "multiply `mean` and `std` by 255"
        )


def check_images_of(preprocessor: nn.Module, images: Tensor, prefix: str = "") -> None:
    """`check_pixel_range` with a preprocessor's numbers; `prefix` is "second_" for the second view's."""
    mean, std = (getattr(preprocessor, prefix + name, None) for name in ("mean", "std"))
    check_pixel_range(images, mean, std)
