"""Tokens that know nothing but pixels: the encoder whose features are windows of the image."""

from torch import Tensor, nn

from mapet_mm.registry import MODELS


@MODELS.register_module()
class WindowPixels(nn.Module):
    """The pixels of a window around each patch, as an encoder of `GridKMeans`; it learns nothing.

    Args:
        window_size: side of a window in pixels; beyond the image's edge its outermost pixels are repeated.
        patch_size: side of the patches in pixels; a window has its patch in its middle.
    """

    def __init__(self, window_size: int, patch_size: int) -> None:
        super().__init__()
        margin = (window_size - patch_size) // 2
        self.pad = nn.ReplicationPad2d(margin)
        self.windows = nn.Unfold(window_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        """The windows' values (B, N, 3 S S) of images (B, 3, H, W), in raster order of the patches."""
        return self.windows(self.pad(images)).transpose(1, 2)
