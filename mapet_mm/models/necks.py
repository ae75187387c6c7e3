"""CAE's regressor and decoder, of another width than the encoder's."""

from jaxtyping import Float
from mmpretrain.models.necks import CAENeck
from torch import Tensor, nn

from mapet_mm.registry import MODELS


@MODELS.register_module()
class ProjectedCAENeck(CAENeck):
    """MMPretrain's `CAENeck` at a width of its own, between two linear projections.

    MMPretrain's has to be as wide as the encoder. Here, where the two differ, the latents and the position
    embeddings of the visible and the masked patches are projected to the neck's width, and the latents that
    it predicts back to the encoder's, where CAE aligns them with those of its teacher. CAE's authors project
    the teacher's latents down instead; MMPretrain's algorithm, which stays as it is, compares at the
    encoder's width.

    Args:
        encoder_dims: width of the encoder.
        embed_dims: width of regressor and decoder.
        num_classes: size of the vocabulary.
        **kwargs: those of `CAENeck`: `num_heads`, `regressor_depth`, `decoder_depth`, `mask_tokens_num`,
            `layer_scale_init_value`, ...
    """

    def __init__(self, encoder_dims: int, embed_dims: int, num_classes: int = 8192, **kwargs) -> None:
        super().__init__(num_classes=num_classes, embed_dims=embed_dims, **kwargs)
        self.vocab_size = num_classes
        self.encoder_to_neck = self.position_to_neck = self.neck_to_encoder = nn.Identity()
        if encoder_dims != embed_dims:
            self.encoder_to_neck = nn.Sequential(
                nn.Linear(encoder_dims, embed_dims), nn.LayerNorm(embed_dims, eps=1e-6)
            )
            self.position_to_neck = nn.Linear(encoder_dims, embed_dims, bias=False)
            self.neck_to_encoder = nn.Linear(embed_dims, encoder_dims)

    def forward(
        self,
        x_unmasked: Float[Tensor, "batch visible encoder_dim"],
        pos_embed_masked: Float[Tensor, "batch masked encoder_dim"],
        pos_embed_unmasked: Float[Tensor, "batch visible encoder_dim"],
    ) -> tuple[Float[Tensor, "batch masked vocab"], Float[Tensor, "batch masked encoder_dim"]]:
        """Predict the masked patches.

        Args:
            x_unmasked: `(B, v, E)` latents of the visible patches, without class token.
            pos_embed_masked: `(B, m, E)` position embeddings of the masked patches.
            pos_embed_unmasked: `(B, v, E)` those of the visible ones.

        Returns:
            Logits over the vocabulary `(B, m, V)` and predicted latents `(B, m, E)` of the masked patches.

        Raises:
            ValueError: the masks hide another number of patches than the neck was built for.
        """
        if pos_embed_masked.shape[1] != self.mask_token_num:
            raise ValueError(
                f"the masks hide {pos_embed_masked.shape[1]} patches, the neck was built for "
                f"`mask_tokens_num`={self.mask_token_num}: set both to the same number"
            )
        logits, latents = super().forward(
            self.encoder_to_neck(x_unmasked),
            self.position_to_neck(pos_embed_masked),
            self.position_to_neck(pos_embed_unmasked),
        )
        return logits, self.neck_to_encoder(latents)
