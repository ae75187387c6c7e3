"""Feature maps that cover their image exactly."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def cut_padding(
    feature_map: Float[Tensor, "batch channel row column"],
    image_size: Sequence[int],
    patch_size: Sequence[int],
) -> Float[Tensor, "batch channel row column"]:
    """The map of an image that was padded to whole patches, without what the padding answered.

    A decoder stretches a map over its image. That of an image of 256 x 341 pixels in patches of 16 has 22
    columns, which lie over 352 pixels: stretched as it is, an edge comes out up to 11 pixels beside its
    place. So as many values are read anew, linearly, from the part of the map that lies over the image.

    Args:
        feature_map: one value for each patch.
        image_size: (height, width) of the image before it was padded, on its lower and right side.
        patch_size: (height, width) of a patch, or its stride.

    Returns:
        The map itself where the image has whole patches.

    Examples:
        >>> columns = torch.tensor([0.0, 1.0]).expand(1, 1, 1, 2)
        >>> cut_padding(columns, (16, 24), (16, 16))  # the second column is half padding
        tensor([[[[0.0000, 0.6250]]]])
    """
    for dim, (size, patch) in enumerate(zip(image_size, patch_size, strict=True), start=2):
        num_cells = feature_map.shape[dim]
        if num_cells * patch != size:
            weights = _linear_weights(num_cells, size / (num_cells * patch)).to(feature_map)
            feature_map = (feature_map.movedim(dim, -1) @ weights.T).movedim(-1, dim)
    return feature_map.contiguous()


def _linear_weights(num_cells: int, share: float) -> Float[Tensor, "cell cell"]:
    """Weights of a row of cells for as many, evenly spaced over the first part of it."""
    cells = torch.arange(num_cells)
    centres = ((cells + 0.5) * share - 0.5).clamp(0, num_cells - 1)
    return (1 - (centres[:, None] - cells).abs()).clamp(min=0)
