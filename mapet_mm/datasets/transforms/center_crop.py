"""The central crop of Hugging Face's image processors."""

from mmcv.transforms import CenterCrop as MMCVCenterCrop

from mapet_mm.registry import TRANSFORMS


@TRANSFORMS.register_module()
class CenterCrop(MMCVCenterCrop):
    """MMCV's `CenterCrop` with its first row and column rounded down, as transformers does it.

    MMCV, timm and torchvision round half a pixel to the even number.

    Args:
        **kwargs: as for MMCV's: `crop_size`, a side or (width, height).

    Examples:
        >>> import numpy as np
        >>> CenterCrop(crop_size=2)(dict(img=np.arange(5)[None].repeat(2, 0)))["img"]
        array([[1, 2],
               [1, 2]])
    """

    def transform(self, results: dict) -> dict:
        """Leave out the last row and column where an odd number of them is cropped, and crop."""
        width, height = self.crop_size
        for key in ("img", "gt_seg_map"):
            picture = results.get(key)
            if picture is not None:
                rows, columns = picture.shape[:2]
                results[key] = picture[: rows - (rows - height) % 2, : columns - (columns - width) % 2]
        return super().transform(results)
