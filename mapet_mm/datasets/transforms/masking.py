"""BEiT's block-wise masks, for MMPretrain's BEiT and CAE on token grids."""

import numpy as np
from mmengine.utils import to_2tuple
from mmpretrain.datasets.transforms import BEiTMaskGenerator

from mapet_mm.registry import TRANSFORMS

# After this many failed draws, mask single patches (a grid of one row fits no block).
ATTEMPTS = 200


@TRANSFORMS.register_module()
class BlockwiseMask(BEiTMaskGenerator):
    """Mask blocks until a number of patches is masked; adds `mask`, `(H, W)` int64 (BEiT, Algorithm 1).

    MMPretrain's `BEiTMaskGenerator` never masks the grid's last row and last column, because it draws a
    block's corner from a range that is one too short.

    Args:
        input_size: patches per side, or (height, width).
        num_masking_patches: exact number of masked patches; BEiT's is 75 of 196.
        min_num_patches: fewest patches of a block, before it is cut to the remaining budget.
        **kwargs: of `BEiTMaskGenerator`: `max_num_patches`, `min_aspect`, `max_aspect`.

    Raises:
        ValueError: the patches to mask are not fewer than all patches.

    Examples:
        >>> mask = BlockwiseMask(input_size=14, num_masking_patches=75)({})["mask"]
        >>> mask.shape, int(mask.sum())
        ((14, 14), 75)
    """

    def __init__(
        self,
        input_size: int | tuple[int, int],
        num_masking_patches: int,
        min_num_patches: int = 16,
        **kwargs,
    ) -> None:
        super().__init__(to_2tuple(input_size), num_masking_patches, min_num_patches, **kwargs)
        if not 0 < num_masking_patches < self.num_patches:
            raise ValueError(
                f"BlockwiseMask's num_masking_patches={num_masking_patches} is outside "
                f"1..{self.num_patches - 1}"
            )

    def _mask(self, mask: np.ndarray, max_mask_patches: int) -> int:
        """Mask one more block in place, or a patch if none fits; returns the number of patches added."""
        for _ in range(ATTEMPTS):
            area = np.random.uniform(self.min_num_patches, max_mask_patches)
            aspect = np.exp(np.random.uniform(*self.log_aspect_ratio))
            height = round(np.sqrt(area * aspect))
            width = round(np.sqrt(area / aspect))
            if height >= self.height or width >= self.width:
                continue
            top = np.random.randint(self.height - height + 1)
            left = np.random.randint(self.width - width + 1)
            block = mask[top : top + height, left : left + width]
            added = block.size - int(block.sum())
            if 0 < added <= max_mask_patches:
                block[:] = 1
                return added
        mask.flat[np.random.choice(np.flatnonzero(mask == 0))] = 1
        return 1
