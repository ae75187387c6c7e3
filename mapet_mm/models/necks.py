"""CAE's regressor and decoder, of another width than the encoder's."""

from jaxtyping import Float
from mmpretrain.models.necks import CAENeck
from torch import Tensor, nn

from mapet_mm.registry import MODELS


@MODELS.register_module()
class ProjectedCAENeck(CAENeck):
    """MMPretrain's `CAENeck` at a width of its own, for `mapet_mm.models.cae.ProjectedCAE`.

    `encoder_to_neck` takes latents of the encoder to the neck's width: a linear layer and a LayerNorm, as in
    the code of CAE's authors, or nothing where the widths are the same.

    Args:
        encoder_dims: width of the encoder.
        embed_dims: width of regressor and decoder.
        num_classes: size of the vocabulary.
        **kwargs: those of `CAENeck`: `num_heads`, `regressor_depth`, `decoder_depth`, `mask_tokens_num`,
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
        """Predict the masked patches.

        Args:
            x_unmasked: `(B, v, D)` projected latents of the visible patches, without class token.
            pos_embed_masked: `(B, m, D)` positions of the masked patches.
            pos_embed_unmasked: `(B, v, D)` those of the visible ones.

        Returns:
            Logits over the vocabulary `(B, m, V)` and predicted latents `(B, m, D)` of the masked patches.

        Raises:
            ValueError: the latents are not projected, or the masks hide another number of patches than the
                neck was built for.
        """
        if x_unmasked.shape[-1] != self.embed_dim:
            raise ValueError(
                f"the latents are {x_unmasked.shape[-1]} wide, the neck {self.embed_dim}: MMPretrain's CAE "
                'does not project them, `model.type="mapet_mm.ProjectedCAE"` does'
            )
        if pos_embed_masked.shape[1] != self.mask_token_num:
            raise ValueError(
                f"the masks hide {pos_embed_masked.shape[1]} patches, the neck was built for "
                f"`mask_tokens_num`={self.mask_token_num}: set both to the same number"
            )
        return super().forward(x_unmasked, pos_embed_masked, pos_embed_unmasked)
