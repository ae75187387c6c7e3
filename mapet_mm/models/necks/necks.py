"""Necks: CAE's regressor and decoder at a width of their own, and BatchNorm for linear segmentation."""

from collections.abc import Sequence

from jaxtyping import Float
from mmcv.cnn import build_norm_layer
from mmengine.model import BaseModule
from mmpretrain.models.necks import CAENeck
from torch import Tensor, nn

from mapet_mm.registry import MODELS


@MODELS.register_module()
class ProjectedCAENeck(CAENeck):
    """MMPretrain's `CAENeck` at a width of its own, for `mapet_mm.models.selfsup.cae.ProjectedCAE`.

    `encoder_to_neck` takes latents of the encoder to the neck's width: a linear layer and a LayerNorm, as in
    the code of CAE's authors, or nothing where the widths are the same.

    Args:
        encoder_dims: width of the encoder.
        embed_dims: width of regressor and decoder.
        num_classes: size of the vocabulary.
        **kwargs: as for `CAENeck`: `num_heads`, `regressor_depth`, `decoder_depth`, `mask_tokens_num`,
            `layer_scale_init_value`, `drop_path_rate`, ...
    """

    def __init__(self, encoder_dims: int, embed_dims: int, num_classes: int = 8192, **kwargs) -> None:
        super().__init__(num_classes=num_classes, embed_dims=embed_dims, **kwargs)
        self.vocab_size = num_classes
        self.encoder_to_neck = nn.Identity()
        if encoder_dims != embed_dims:
            self.encoder_to_neck = nn.Sequential(
                nn.Linear(encoder_dims, embed_dims), nn.LayerNorm(embed_dims, eps=1e-6)
            )

    def forward(
        self,
        x_unmasked: Float[Tensor, "batch visible width"],
        pos_embed_masked: Float[Tensor, "batch masked width"],
        pos_embed_unmasked: Float[Tensor, "batch visible width"],
    ) -> tuple[Float[Tensor, "batch masked vocab"], Float[Tensor, "batch masked width"]]:
        """Predict the masked patches: logits `(B, m, V)` and latents `(B, m, D)`.

        Args:
            x_unmasked: `(B, v, D)` projected latents of the visible patches, without class token.
            pos_embed_masked: `(B, m, D)` positions of the masked patches.
            pos_embed_unmasked: `(B, v, D)` positions of the visible patches.

        Raises:
            ValueError: the masks hide another number of patches than the neck was built for.
        """
        if pos_embed_masked.shape[1] != self.mask_token_num:
            raise ValueError(
                f"masks of {pos_embed_masked.shape[1]} patches, mask_tokens_num={self.mask_token_num}"
            )
        return super().forward(x_unmasked, pos_embed_masked, pos_embed_unmasked)


@MODELS.register_module()
class BatchNormNeck(BaseModule):
    """Dropout of channels and BatchNorm of a frozen backbone's last feature map, before a linear classifier.

    Args:
        channels: width of the feature map.
        dropout: share of the channels that are dropped in training.
        norm_cfg: the norm, `dict(type="BN")` by default, "SyncBN" in several processes.
        init_cfg: as for any MMEngine module.
    """

    def __init__(
        self,
        channels: int,
        dropout: float = 0.1,
        norm_cfg: dict | None = None,
        init_cfg: dict | list[dict] | None = None,
    ) -> None:
        super().__init__(init_cfg)
        self.dropout = nn.Dropout2d(dropout)
        self.norm = build_norm_layer(norm_cfg or dict(type="BN"), channels)[1]

    def forward(
        self, feature_maps: Sequence[Float[Tensor, "batch channel row column"]]
    ) -> tuple[Float[Tensor, "batch channel row column"]]:
        """The last feature map `(B, C, H, W)`, normalised, as the only one."""
        return (self.norm(self.dropout(feature_maps[-1])),)
