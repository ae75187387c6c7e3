"""CAE with a regressor and decoder of another width than the encoder's."""

import torch
from jaxtyping import Float
from mmpretrain.models.selfsup import CAE
from mmpretrain.models.utils import build_2d_sincos_position_embedding
from mmpretrain.structures import DataSample
from torch import Tensor

from mapet_mm.registry import MODELS


@MODELS.register_module()
class ProjectedCAE(CAE):
    """MMPretrain's `CAE` around a `mapet_mm.models.necks.necks.ProjectedCAENeck`.

    As in the code of CAE's authors, one projection brings the encoder's and the teacher's latents to the
    width of regressor and decoder, where predicted and true latents are compared, and the positions are fixed
    sines and cosines at that width. MMPretrain's `CAE` compares at the encoder's width and uses the encoder's
    positions; if both widths are equal, the two are the same.

    Args:
        **kwargs: as for MMPretrain's `CAE`: `backbone`, `neck`, `head`, `target_generator`,
            `base_momentum`, `data_preprocessor`, `init_cfg`.

    Examples:
        >>> vit = dict(type="mmpretrain.CAEPretrainViT", arch="deit-tiny", img_size=32)
        >>> widths = dict(encoder_dims=192, embed_dims=96, num_heads=3, num_classes=64)
        >>> options = dict(mask_tokens_num=2, layer_scale_init_value=0.1)
        >>> model = ProjectedCAE(
        ...     backbone=dict(vit, layer_scale_init_value=0.1),
        ...     neck=dict(type="mapet_mm.ProjectedCAENeck", **widths, **options),
        ...     head=dict(type="mapet_mm.CAETokenHead", loss=dict(type="mmpretrain.CAELoss", lambd=2)),
        ...     target_generator=dict(type="mapet_mm.PrecomputedTokens", vocab_size=64),
        ... )
        >>> sample = DataSample(mask=torch.tensor([[1, 0], [1, 0]]))
        >>> losses = model.loss([torch.randn(1, 3, 32, 32), torch.randint(64, (1, 2, 2))], [sample])
        >>> list(losses)
        ['loss', 'main', 'align']
    """

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        positions = build_2d_sincos_position_embedding(self.backbone.patch_resolution, self.neck.embed_dim)
        self.register_buffer("neck_positions", positions, persistent=False)  # 1 N-1 D

    def loss(self, inputs: list[Tensor], data_samples: list[DataSample], **kwargs) -> dict[str, Tensor]:
        """Losses of images and what the target generator takes, whose samples have a `mask` `(H, W)`.

        `loss` is the sum of `main`, the cross-entropy of the masked patches' tokens, and `align`, the
        weighted squared error of their latents.
        """
        images, targets = inputs
        masked = torch.stack([sample.mask for sample in data_samples]).flatten(1).bool()  # B N-1

        # The encoder sees the visible patches, its momentum copy the masked ones.
        visible = self._project(self.backbone(images, masked))
        with torch.no_grad():
            true_latents = self._project(self.teacher(images, ~masked))
            self.momentum_update()

        # The regressor predicts the masked patches' latents, the decoder their tokens. Each image has as
        # many masked patches, and as many visible ones.
        # So their number is known, and nothing waits for the device to count them.
        num_visible = visible.shape[1]
        order = masked.byte().argsort(dim=1, descending=True, stable=True)  # B N-1, the masked patches first
        positions = self.neck_positions[0][order]  # B N-1 D
        of_masked, of_visible = positions.split([masked.shape[1] - num_visible, num_visible], dim=1)
        logits, latents = self.neck(visible, of_masked, of_visible)

        tokens = self.target_generator(targets)
        main, align = self.head.loss(logits.flatten(0, 1), tokens, latents, true_latents, masked)
        return {"loss": main + align, "main": main, "align": align}

    def _project(self, latents: Float[Tensor, "batch token encoder_dim"]) -> Float[Tensor, "batch patch dim"]:
        """The patches' latents at the neck's width, without the class token's."""
        return self.neck.encoder_to_neck(latents[:, 1:])
