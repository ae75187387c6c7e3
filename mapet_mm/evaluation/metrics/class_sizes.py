"""Classes of unequal size: a figure over images would be that of the largest."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

# The largest class may have so many times the images of the smallest, before each class counts as one.
MOST_TIMES = 3


def are_unequal(sizes: Int64[Tensor, " class"]) -> bool:
    """True if classes of so many images are to count alike, each as one.

    Args:
        sizes: images of each class; classes without any are passed over.

    Examples:
        >>> are_unequal(torch.tensor([4750, 250])), are_unequal(torch.tensor([60, 50, 0]))
        (True, False)
    """
    known = sizes[sizes > 0]
    return len(known) > 0 and bool(known.max() > MOST_TIMES * known.min())


def class_weights(sizes: Int64[Tensor, " class"]) -> Float[Tensor, " class"] | None:
    """What an image of each class counts, so that unequal classes count alike; None if images may.

    These are the weights of scikit-learn's `class_weight="balanced"`, 1 on average over the images. A class
    without images has weight 0.

    Examples:
        >>> class_weights(torch.tensor([80, 20]))
        tensor([0.6250, 2.5000])
    """
    if not are_unequal(sizes):
        return None
    has_images = sizes > 0
    alike = sizes.sum() / has_images.sum()
    return torch.where(has_images, alike / sizes.clamp(min=1), 0.0)
