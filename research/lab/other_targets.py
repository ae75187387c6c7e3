"""Algorithms that only tables need, beside the suite's own.

BEiT with a loss of the visible patches; a permuted predictor behind an encoder of the visible patches; CLIP's
features as targets.
"""

from __future__ import annotations

from typing import Any

import torch
from mmengine.model import BaseModule
from torch import Tensor, nn
from torch.nn import functional as F

from mapet_mm.models.heads.token_prediction_head import BEiTTokenHead
from mapet_mm.models.selfsup.visible_mim import VisibleMIM
from mapet_mm.models.target_generators.kclip import KCLIP
from mapet_mm.models.target_generators.token_ids import token_ids
from mapet_mm.registry import MODELS
from mapet_mm.utils.precision import product_dtype


@MODELS.register_module()
class BEiTContextHead(BEiTTokenHead):
    """`BEiTTokenHead` with a second cross-entropy, of the patches that are not masked.

    Args:
        context_loss: its weight.
        **kwargs: as for `BEiTTokenHead`.
    """

    def __init__(self, *args: Any, context_loss: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context_loss = context_loss

    def loss(self, latents: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        """The loss of the masked patches plus `context_loss` times that of all others, in nats."""
        of_targets = super().loss(latents, targets, mask)
        visible = ~mask.flatten(1).bool()
        of_context, _ = self.cross_entropy(latents[:, 1:], token_ids(targets), counted=visible)
        return of_targets + self.context_loss * of_context


@MODELS.register_module()
class VisibleMaPeT(VisibleMIM):
    """`VisibleMIM` whose predictor permutes: its layers are MaPeT's, over the layout `C | M | T | Q`.

    C holds the encoder's outputs, the other groups what they hold in MaPeT, so a target's prediction sees the
    targets before it. The neck is a `MaPeTPretrainViT` of a few layers, with the backbone's cutting point.
    """

    def latents(
        self, images: Tensor, permutation: Tensor | None, with_context: bool = False
    ) -> tuple[Tensor, Tensor]:
        """What the head gets, (B, n, D), and the permutation (B, N): see `MaPeT.latents`."""
        context, permutation = self.backbone(images, permutation)  # B c D, B N
        predictor = self.neck
        tokens = predictor.embed(images, permutation)  # B C|M|T|Q D
        tokens = torch.cat([context, tokens[:, context.shape[1] :]], dim=1)
        layout = predictor.layout.to(product_dtype(tokens))

        *layers, last_layer = predictor.layers
        for layer in layers:
            tokens = layer.two_streams(tokens, layout)
        latents = predictor.last_latents(tokens, last_layer, layout, None, with_context=False)
        if with_context:
            latents = torch.cat([context[:, self.backbone.num_extra_tokens :], latents], dim=1)
        return latents, permutation


@MODELS.register_module()
class KCLIPFeatures(KCLIP):
    """k-CLIP's tower without its codebook: the targets are its features themselves."""

    vocab_size = 0


@MODELS.register_module()
class FeatureRegressionHead(BaseModule):
    """A linear layer to the features' width, and a smooth L1 loss against the features, each normalised.

    Args:
        embed_dims: width of the latents.
        feature_dims: width of the features.
        **kwargs: as for any MMEngine module: `init_cfg`.
    """

    vocab_size = 0

    def __init__(self, embed_dims: int, feature_dims: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.projection = nn.Linear(embed_dims, feature_dims)

    def loss(self, latents: Tensor, features: Tensor) -> dict[str, Tensor]:
        """Losses of latents (B, n, D) against features (B, n, F).

        The log has the explained variance of the normalised features, in percent, where it has accuracies
        elsewhere: as `token_accuracy`.
        """
        targets = F.layer_norm(features, features.shape[-1:])
        predicted = self.projection(latents)
        explained = 1 - F.mse_loss(predicted, targets).detach()
        return {"loss": F.smooth_l1_loss(predicted, targets), "token_accuracy": 100 * explained}


@MODELS.register_module()
class VisibleFeatureRegression(VisibleMIM):
    """`VisibleMIM` that regresses k-CLIP's features instead of classifying their clusters.

    Its target generator is a `KCLIPFeatures`, its head a `FeatureRegressionHead`.
    """

    @torch.no_grad()
    def target_tokens(self, target_inputs: Tensor, permutation: Tensor, with_context: bool = False) -> Tensor:
        """The features (B, n, F) of each target, or with the context of each patch, in permuted order."""
        features = self.target_generator.features(target_inputs)
        extra = self.backbone.num_extra_tokens
        first_rank = extra if with_context else self.backbone.cutting_point
        patches = permutation[:, first_rank:] - extra
        return features.gather(1, patches[..., None].expand(-1, -1, features.shape[-1]))
