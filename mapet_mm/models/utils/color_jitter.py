"""Colour jitter of a batch on its device: each image by its own seed, with torchvision's float operators."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mapet_mm.models.utils.seeded_draws import seeded_uniform

# Of red, green and blue in the grey of a pixel; torchvision's (ITU-R 601-2).
GREY_WEIGHTS = (0.2989, 0.587, 0.114)
BRIGHTNESS, CONTRAST, SATURATION = range(3)
WHITE = 255.0
# Draws for an image: a factor for each operation, and a key that orders the operations.
NUM_DRAWS = 6
# Sets the jitter's draws apart from those of the image's permutation, which come from the same seed.
STREAM = 1


class BatchColorJitter:
    """Change brightness, contrast and saturation of each image of a batch, in a drawn order.

    Factors are uniform in `[1 - x, 1 + x]`, and all orders of the operations are equally likely, as in
    torchvision's `ColorJitter`, whose operators on float images give the same values. An image's draws depend
    on its seed alone, on every device and in whatever batch it comes. Nothing is read back from the device.

    Args:
        brightness: at most this far from the factor 1; from 0 to 1.
        contrast: the same for the distance of each pixel to the image's mean grey.
        saturation: the same for the distance of each pixel to its own grey.

    Raises:
        ValueError: a value is not from 0 to 1.

    Example:
        >>> jitter = BatchColorJitter(brightness=0.4, contrast=0.4, saturation=0.4)
        >>> images = torch.full((2, 3, 4, 4), 128.0)
        >>> jitter(images, torch.tensor([7, 8])).shape
        torch.Size([2, 3, 4, 4])
    """

    def __init__(self, brightness: float = 0.0, contrast: float = 0.0, saturation: float = 0.0) -> None:
        self.ranges = (brightness, contrast, saturation)
        for name, value in zip(("brightness", "contrast", "saturation"), self.ranges, strict=True):
            if not 0 <= value <= 1:
                raise ValueError(f"color_jitter: {name}={value} is not from 0 to 1")

    def __call__(
        self, images: Float[Tensor, "batch 3 height width"], seeds: Int64[Tensor, " batch"]
    ) -> Float[Tensor, "batch 3 height width"]:
        """The jittered images.

        Args:
            images: RGB, `(B, 3, H, W)` from 0 to 255; not changed.
            seeds: `(B,)` int64, one for each image, on the images' device.
        """
        factors, order = self.draw(seeds)
        for step in range(len(self.ranges)):
            operation = order[:, step]
            factor = factors.gather(1, operation[:, None])  # B 1
            images = blend(images, operation, factor[..., None, None].to(images.dtype))
        return images

    def draw(
        self, seeds: Int64[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch operation"], Int64[Tensor, "batch operation"]]:
        """The factor of each operation, `(B, 3)`, and the operations in the order of each image, `(B, 3)`."""
        draws = seeded_uniform(seeds, NUM_DRAWS, stream=STREAM)
        levels, keys = draws.chunk(2, dim=1)  # B 3 each
        widths = torch.tensor(self.ranges, dtype=draws.dtype).to(draws.device, non_blocking=True)
        factors = 1 + widths * (2 * levels - 1)
        return factors, keys.argsort(dim=1)


def blend(
    images: Float[Tensor, "batch 3 height width"],
    operation: Int64[Tensor, " batch"],
    factor: Float[Tensor, "batch 1 1 1"],
) -> Float[Tensor, "batch 3 height width"]:
    """One operation on each image: a blend of the image and black, its mean grey, or each pixel's grey."""
    weights = images.new_tensor(GREY_WEIGHTS)
    grey = torch.einsum("bchw,c->bhw", images, weights)[:, None]  # B 1 H W
    mean = grey.mean(dim=(2, 3), keepdim=True)  # B 1 1 1
    operation = operation[:, None, None, None]
    other = torch.where(operation == SATURATION, grey, mean)
    other = torch.where(operation == BRIGHTNESS, 0.0, other)
    blended = factor * images + (1 - factor) * other
    return blended.clamp(0.0, WHITE)
