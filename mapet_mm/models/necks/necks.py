"""Necks: CAE's at another width, BatchNorm for linear segmentation, a feature pyramid of a plain ViT."""

from collections.abc import Sequence
from math import frexp

from jaxtyping import Float
from mmcv.cnn import build_norm_layer
from mmengine.model import BaseModule
from mmpretrain.models.necks import CAENeck
from mmpretrain.models.utils import LayerNorm2d
from torch import Tensor, nn
from torch.nn import functional as F

from mapet_mm.registry import MODELS


@MODELS.register_module()
class ProjectedCAENeck(CAENeck):
    """MMPretrain's `CAENeck` at another width than the encoder's, for `ProjectedCAE`.

    `encoder_to_neck` takes latents of the encoder to the neck's width: a linear layer and a LayerNorm, as in
    the code of CAE's authors, or nothing where the widths are the same.

    Args:
        encoder_dims: width of the encoder.
        embed_dims: width of regressor and decoder.
        num_classes: size of the vocabulary.
        **kwargs: as for `CAENeck`: `num_heads`, `regressor_depth`, `decoder_depth`, `mask_tokens_num`,
            `layer_scale_init_value`, `drop_path_rate`, ...

    Examples:
        >>> options = dict(num_heads=3, mask_tokens_num=2, layer_scale_init_value=0.1)
        >>> neck = ProjectedCAENeck(encoder_dims=384, embed_dims=192, **options)
        >>> neck.encoder_to_neck(torch.randn(1, 4, 384)).shape
        torch.Size([1, 4, 192])
    """

    def __init__(self, encoder_dims: int, embed_dims: int, num_classes: int = 8192, **kwargs) -> None:
        super().__init__(num_classes=num_classes, embed_dims=embed_dims, **kwargs)
        self.vocab_size = num_classes
        self.encoder_to_neck = nn.Identity()
        if encoder_dims != embed_dims:
            self.encoder_to_neck = nn.Sequential(
                nn.Linear(encoder_dims, embed_dims), nn.LayerNorm(embed_dims, eps=1e-6)
            )


@MODELS.register_module()
class BatchNormNeck(BaseModule):
    """Dropout of channels and BatchNorm of a frozen backbone's last feature map, before a linear classifier.

    Args:
        channels: width of the feature map.
        dropout: share of the channels that are dropped in training.
        norm_cfg: the norm, `dict(type="BN")` by default, "SyncBN" in several processes.
        **kwargs: as for any MMEngine module: `init_cfg`.

    Examples:
        >>> (features,) = BatchNormNeck(channels=192)([torch.randn(2, 192, 14, 14)])
        >>> features.shape
        torch.Size([2, 192, 14, 14])
    """

    def __init__(self, channels: int, dropout: float = 0.1, norm_cfg: dict | None = None, **kwargs) -> None:
        super().__init__(**kwargs)
        self.dropout = nn.Dropout2d(dropout)
        self.norm = build_norm_layer(norm_cfg or dict(type="BN"), channels)[1]

    def forward(
        self, feature_maps: Sequence[Float[Tensor, "batch channel row column"]]
    ) -> tuple[Float[Tensor, "batch channel row column"]]:
        """The last feature map `(B, C, H, W)`, normalised, as the only one."""
        return (self.norm(self.dropout(feature_maps[-1])),)


@MODELS.register_module()
class SimpleFeaturePyramid(BaseModule):
    """ViTDet's simple feature pyramid: every map comes from the ViT's last one (Li et al., 2022, Section 3).

    A neck for MMSegmentation and MMDetection. All maps of a ViT have the stride of its patches, so an FPN
    over several layers would merge maps that are not a pyramid. The backbone needs `out_type='featmap'`; of
    several maps, the last one is used.

    Args:
        in_channels: width of the ViT.
        out_channels: width of the maps.
        scale_factors: powers of two, from the finest map to the coarsest; with patches of 16 pixels the
            default makes strides 4, 8, 16 and 32.
        num_outs: number of maps, at least one a factor; the others take every second value of the one before.
        **kwargs: as for any MMEngine module: `init_cfg`.

    Raises:
        ValueError: a scale factor that is not a power of two.

    Examples:
        >>> maps = SimpleFeaturePyramid(in_channels=192)([torch.randn(1, 192, 14, 14)])
        >>> [each.shape[-1] for each in maps]
        [56, 28, 14, 7]
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int = 256,
        scale_factors: Sequence[float | int] = (4, 2, 1, 0.5),
        num_outs: int = 0,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.num_outs = num_outs
        self.levels = nn.ModuleList(_level(in_channels, out_channels, octaves_of(x)) for x in scale_factors)

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Float[Tensor, "batch channel _ _"], ...]:
        """The maps, `(B, out_channels, h, w)` each, from the finest to the coarsest."""
        maps = [level(inputs[-1]) for level in self.levels]
        while len(maps) < self.num_outs:
            maps.append(F.max_pool2d(maps[-1], kernel_size=1, stride=2))
        return tuple(maps)


def octaves_of(scale_factor: float | int) -> int:
    """How often a size is doubled (or, below 0, halved) to be scaled by a power of two."""
    mantissa, exponent = frexp(scale_factor)
    if mantissa != 0.5:
        raise ValueError(f"scale_factors of SimpleFeaturePyramid are powers of two, got {scale_factor}")
    return exponent - 1


def _level(in_channels: int, out_channels: int, octaves: int) -> nn.Sequential:
    """One map: doubled in size `octaves` times (halved if below 0), then brought to its width."""
    layers: list[nn.Module] = []
    channels = in_channels
    for octave in range(octaves):
        if octave:
            layers += [LayerNorm2d(channels, eps=1e-6), nn.GELU()]
        layers.append(nn.ConvTranspose2d(channels, channels // 2, kernel_size=2, stride=2))
        channels //= 2
    if octaves < 0:
        layers.append(nn.MaxPool2d(2**-octaves))
    layers += [
        nn.Conv2d(channels, out_channels, kernel_size=1, bias=False),
        LayerNorm2d(out_channels, eps=1e-6),
        nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
        LayerNorm2d(out_channels, eps=1e-6),
    ]
    return nn.Sequential(*layers)
