"""Base class of the tokenizers that encode images: frozen, outside the model's weights."""

from __future__ import annotations

from itertools import chain

from mmengine.model import BaseModule
from torch import Tensor, nn

from mapet_mm.utils.errors import UserError


class TokenizerError(UserError, ValueError):
    """A tokenizer cannot be built from its config, or its weights do not fit; the message is one line."""


class Tokenizer(BaseModule):
    """Target generator that maps images to token ids with a frozen network.

    The network is not a submodule, so a model that tokenises on the fly neither trains, saves nor converts
    it. Its weights stay in float32 and it in evaluation mode, and it moves to the device of its images.
    `forward` gives the ids (B, HW), int64, in raster order, of normalised images (B, 3, H, W): -1 where the
    network's features or logits are not finite.

    Args:
        network: encodes images of `image_size` x `image_size` pixels.
    """

    grid: tuple[int, int]  # (H, W) tokens of an image of `image_size`
    digest: str  # of everything that decides an image's tokens
    precision: str = "float32"  # in which the network computes, one of `PRECISIONS`

    def __init__(self, network: nn.Module, image_size: int) -> None:
        super().__init__()
        self.image_size = image_size
        network.float().requires_grad_(False)
        network.eval()  # not chained: MMPretrain's backbones return None here
        self._networks = (network,)  # in a tuple, where it is not a submodule
        self.eval()

    @property
    def network(self) -> nn.Module:
        """The frozen network, on the device of the last images."""
        return self._networks[0]

    def train(self, mode: bool = True) -> Tokenizer:
        """Stay in evaluation mode whatever `mode` is: tokens must not depend on the batch."""
        return super().train(False)

    def network_for(self, images: Tensor) -> nn.Module:
        """The frozen network, on the images' device; ValueError if the images have another size."""
        side = self.image_size
        if images.shape[-2:] != (side, side):
            raise ValueError(
                f"{type(self).__name__} takes images of {side} x {side} px, got {images.shape[-2]} x "
                f"{images.shape[-1]}: resize in the pipeline or set `image_size`"
            )
        first = next(chain(self.network.parameters(), self.network.buffers()), images)
        if first.device != images.device:
            self.network.to(images.device)
        return self.network
