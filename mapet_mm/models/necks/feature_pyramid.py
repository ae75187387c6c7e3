"""Feature maps of several strides from a plain ViT, for decoders and detectors that need a pyramid."""

from collections.abc import Sequence
from math import log2

from jaxtyping import Float
from mmengine.model import BaseModule
from mmpretrain.models.utils import build_norm_layer
from torch import Tensor, nn
from torch.nn import functional as F

from mapet_mm.registry import MODELS


@MODELS.register_module()
class SimpleFeaturePyramid(BaseModule):
    """ViTDet's simple feature pyramid: every map comes from the ViT's last one (Li et al., 2022, Section 3).

    A neck for MMSegmentation and MMDetection. All maps of a ViT have the stride of its patches, so an FPN
    over several layers would merge maps that are no pyramid. The backbone needs `out_type='featmap'`; if it
    gives several maps, the last one is used.

    Args:
        in_channels: width of the ViT.
        out_channels: width of the maps.
        scale_factors: powers of two, from the finest map to the coarsest; with patches of 16 pixels the
            default makes strides 4, 8, 16 and 32.
        num_outs: number of maps; those beyond `scale_factors` take every second value of the one before.
        norm_cfg: the norm after each convolution.
        init_cfg: as for any MMEngine module.

    Raises:
        ValueError: scale factors that are not descending powers of two, or fewer maps than these.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int = 256,
        scale_factors: Sequence[float | int] = (4, 2, 1, 0.5),
        num_outs: int | None = None,
        norm_cfg: dict | None = None,
        init_cfg: dict | list[dict] | None = None,
    ) -> None:
        super().__init__(init_cfg)
        factors = list(scale_factors)
        if factors != sorted(set(factors), reverse=True) or any(x <= 0 or log2(x) % 1 for x in factors):
            raise ValueError(f"scale_factors={scale_factors}: powers of two are needed, from large to small")
        self.num_outs = len(factors) if num_outs is None else num_outs
        if self.num_outs < len(factors):
            raise ValueError(f"num_outs={num_outs} is below the number of `scale_factors`")
        norm_cfg = norm_cfg or dict(type="LN2d", eps=1e-6)
        self.levels = nn.ModuleList(
            _level(in_channels, out_channels, int(log2(x)), norm_cfg) for x in factors
        )

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Float[Tensor, "batch channel _ _"], ...]:
        """The maps, `(B, out_channels, h, w)` each, from the finest to the coarsest.

        Args:
            inputs: the backbone's maps `(B, in_channels, h, w)`; the last one is used.
        """
        maps = [level(inputs[-1]) for level in self.levels]
        while len(maps) < self.num_outs:
            maps.append(F.max_pool2d(maps[-1], kernel_size=1, stride=2))
        return tuple(maps)


def _level(in_channels: int, out_channels: int, octaves: int, norm_cfg: dict) -> nn.Sequential:
    """One map: so many times doubled (or, below 0, halved) in size, then brought to its width."""
    layers: list[nn.Module] = []
    channels = in_channels
    for octave in range(octaves):
        if octave:
            layers += [build_norm_layer(norm_cfg, channels), nn.GELU()]
        layers.append(nn.ConvTranspose2d(channels, channels // 2, kernel_size=2, stride=2))
        channels //= 2
    if octaves < 0:
        layers.append(nn.MaxPool2d(2**-octaves))
    layers += [
        nn.Conv2d(channels, out_channels, kernel_size=1, bias=False),
        build_norm_layer(norm_cfg, out_channels),
        nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
        build_norm_layer(norm_cfg, out_channels),
    ]
    return nn.Sequential(*layers)
