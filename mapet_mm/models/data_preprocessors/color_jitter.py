"""Colour jitter of a batch on its device: each image by its own seed, with torchvision's float operators."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from mapet_mm.utils.splitmix import splitmix_of_tensor, uniform_of_tensor

# Weights of red, green and blue in the grey of a pixel; torchvision's (ITU-R 601-2).
RED, GREEN, BLUE = 0.2989, 0.587, 0.114
BRIGHTNESS, CONTRAST, SATURATION = range(3)
WHITE = 255.0
# An image's permutation takes the numbers 1, 2, ... of its seed; the jitter those from here on.
FIRST_NUMBER = 2**32


class BatchColorJitter(nn.Module):
    """Change brightness, contrast and saturation of each image of a batch, in a drawn order.

    Factors are uniform in `[1 - x, 1 + x]`, and all orders of the operations are equally likely, as in
    torchvision's `ColorJitter`, whose operators on float images give the same values. An image's draws depend
    on its seed alone, on every device and in whatever batch it comes. Nothing is read back from the device.

    Args:
        brightness: at most this far from the factor 1; from 0 to 1.
        contrast: the same for the distance of each pixel to the image's mean grey.
        saturation: the same for the distance of each pixel to its own grey; only of RGB.

    The grey of images that are not RGB is the mean of their bands.

    Raises:
        ValueError: a value is not from 0 to 1, or saturation for images that are not RGB.

    Examples:
        >>> jitter = BatchColorJitter(brightness=0.4, contrast=0.4, saturation=0.4)
        >>> images = torch.full((2, 3, 4, 4), 128.0)
        >>> jitter(images, torch.tensor([7, 8])).shape
        torch.Size([2, 3, 4, 4])
    """

    def __init__(self, brightness: float = 0.0, contrast: float = 0.0, saturation: float = 0.0) -> None:
        super().__init__()
        for name, value in dict(brightness=brightness, contrast=contrast, saturation=saturation).items():
            if not 0 <= value <= 1:
                raise ValueError(f"color_jitter: {name}={value} is not from 0 to 1")
        widths = torch.tensor([brightness, contrast, saturation], dtype=torch.float32)
        self.register_buffer("widths", widths, persistent=False)
        self.has_saturation = saturation > 0

    def forward(
        self, images: Float[Tensor, "batch band height width"], seeds: Int64[Tensor, " batch"]
    ) -> Float[Tensor, "batch band height width"]:
        """The jittered images.

        Args:
            images: RGB or other bands, `(B, N, H, W)` from 0 to 255; not changed.
            seeds: `(B,)` int64, one for each image, on the images' device.
        """
        if self.has_saturation and images.shape[1] != 3:
            raise ValueError(
                f"color_jitter: saturation is of RGB, not of {images.shape[1]} bands: set it to 0"
            )
        factors, order = self.draw(seeds)
        for operation in order.split(1, dim=1):  # B 1 each
            factor = factors.gather(1, operation)
            images = blend(images, operation[:, :, None, None], factor[:, :, None, None])
        return images

    def draw(
        self, seeds: Int64[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch operation"], Int64[Tensor, "batch operation"]]:
        """The factor of each operation, `(B, 3)`, and the operations in the order of each image, `(B, 3)`."""
        seeds = seeds[:, None]
        numbers = torch.arange(FIRST_NUMBER, FIRST_NUMBER + len(self.widths), device=seeds.device)
        # How far from 1 each factor is, as a share of the largest distance, from -1 to 1.
        shares = 2 * uniform_of_tensor(seeds, numbers) - 1
        factors = 1 + self.widths * shares
        # The operations in the order of further random numbers.
        order = splitmix_of_tensor(seeds, numbers + len(self.widths)).argsort(dim=1)
        return factors, order


def blend(
    images: Float[Tensor, "batch band height width"],
    operation: Int64[Tensor, "batch 1 1 1"],
    factor: Float[Tensor, "batch 1 1 1"],
) -> Float[Tensor, "batch band height width"]:
    """One operation on each image: a blend of the image and black, its mean grey, or each pixel's grey."""
    grey = grey_of(images)
    mean = grey.mean(dim=(2, 3), keepdim=True)  # B 1 1 1

    # What each image is blended with.
    mean_or_black = torch.where(operation == CONTRAST, mean, 0.0)
    other = torch.where(operation == SATURATION, grey, mean_or_black)
    return torch.lerp(other, images, factor).clamp_(0.0, WHITE)


def grey_of(images: Float[Tensor, "batch band height width"]) -> Float[Tensor, "batch 1 height width"]:
    """The grey of RGB images as torchvision has it, or the mean of other bands."""
    if images.shape[1] != 3:
        return images.mean(dim=1, keepdim=True)
    red, green, blue = images.split(1, dim=1)  # B 1 H W each
    # Sums, not a product of matrices, which autocast would round to 16 bits.
    grey = RED * red
    return grey.add_(green, alpha=GREEN).add_(blue, alpha=BLUE)
