"""The heads that predict visual tokens: MaPeT's, and those for MMPretrain's BEiT and CAE."""

import torch
from jaxtyping import Bool, Float, Int, Int64
from mmengine.model import BaseModule
from mmpretrain.models.heads import CAEHead
from torch import Tensor, nn
from torch.nn import functional as F

from mapet_mm.models.backbones.vit import init_truncated_normal
from mapet_mm.models.losses.linear_cross_entropy import cross_entropy, linear_cross_entropy
from mapet_mm.models.target_generators.token_ids import nan_without_tokens, token_ids
from mapet_mm.models.utils.permutation import should_check_values
from mapet_mm.registry import MODELS
from mapet_mm.utils.precision import sum_dtype


@MODELS.register_module()
class TokenPredictionHead(BaseModule):
    """Linear layer to the vocabulary, with cross-entropy against the targets' tokens (paper, Eq. 2).

    A subclass with another `forward` is trained through it; the logits of the whole batch are then in
    memory. Another loss goes into `cross_entropy`; validation (`evaluate`) reports the plain one.

    Args:
        embed_dims: dimension `D` of the latents.
        vocab_size: number of visual tokens `V`; the paper's is 8192.
        **kwargs: as for any MMEngine module: `init_cfg`.

    Examples:
        >>> head = TokenPredictionHead(embed_dims=192, vocab_size=8192)
        >>> losses = head.loss(torch.randn(2, 137, 192), torch.randint(8192, (2, 137)))
        >>> sorted(losses)
        ['loss', 'token_accuracy']
    """

    def __init__(self, embed_dims: int, vocab_size: int = 8192, **kwargs) -> None:
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.projection = nn.Linear(embed_dims, vocab_size)

    def init_weights(self) -> None:
        """Initialise as the authors do, then as `init_cfg` says; only once, as MMEngine's modules do."""
        if not self.is_init:
            init_truncated_normal(self.projection.weight)
            nn.init.zeros_(self.projection.bias)
        super().init_weights()

    def forward(self, latents: Float[Tensor, "*target dim"]) -> Float[Tensor, "*target vocab"]:
        """Logits over the vocabulary: `(B, n, D) -> (B, n, V)`."""
        return self.projection(latents)

    def loss(
        self, latents: Float[Tensor, "batch target dim"], tokens: Int64[Tensor, "batch target"]
    ) -> dict[str, Tensor]:
        """`loss`, the mean cross-entropy in nats, and `token_accuracy`, top-1, in percent (only logged)."""
        loss, hits = self.cross_entropy(latents, tokens)
        return {"loss": loss, "token_accuracy": 100 * hits.float() / tokens.numel()}

    def cross_entropy(
        self,
        latents: Float[Tensor, "batch target dim"],
        tokens: Int64[Tensor, "batch target"],
        counted: Bool[Tensor, "batch target"] | None = None,
    ) -> tuple[Float[Tensor, ""], Int64[Tensor, ""]]:
        """Mean cross-entropy (nats) of the logits, NaN with a token of -1; and the number of hits.

        All targets count if `counted` is None.
        """
        targets = tokens.clamp(min=0).flatten()  # (B n)
        if counted is not None:
            counted = counted.flatten()
        if self.is_linear:  # without ever holding all logits
            weight = self.projection.weight
            bias = self.projection.bias
            loss, hits = linear_cross_entropy(latents.flatten(0, 1), weight, bias, targets, counted)
        else:
            loss, hits = cross_entropy(self(latents).flatten(0, 1), targets, counted)
        return loss * nan_without_tokens(tokens.flatten()), hits

    @property
    def is_linear(self) -> bool:
        """True if the logits are a linear layer of the latents: no subclass or LoRA computes others."""
        has_plain_forward = type(self).forward is TokenPredictionHead.forward
        has_plain_layer = type(self.projection) is nn.Linear and self.projection.bias is not None
        return has_plain_forward and has_plain_layer

    @torch.no_grad()
    def evaluate(
        self, latents: Float[Tensor, "batch target dim"], tokens: Int64[Tensor, "batch target"]
    ) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
        """Loss in nats and top-1 accuracy in percent of each image, `(B,)` each."""
        logits = self(latents)
        ids = tokens.clamp(min=0).flatten()
        rows = logits.flatten(0, 1).to(sum_dtype(logits.dtype))
        losses = F.cross_entropy(rows, ids, reduction="none").view_as(tokens)
        accuracies = 100 * (logits.argmax(-1) == tokens).float()
        return losses.mean(1) * nan_without_tokens(tokens), accuracies.mean(1)


@MODELS.register_module()
class BEiTTokenHead(TokenPredictionHead):
    """MaPeT's head for MMPretrain's `BEiT`: takes token ids as targets; MMPretrain's takes DALL-E logits.

    Shapes are static: nothing waits for the device to count the masked patches.

    Args:
        max_masked: the largest number of masked patches of an image; the head computes this many rows per
            image. None computes all patches: the same loss with more arithmetic.
        **kwargs: as for `TokenPredictionHead`.

    Examples:
        >>> head = BEiTTokenHead(embed_dims=192, vocab_size=8192, max_masked=2)
        >>> latents = torch.randn(1, 5, 192)  # of the class token and 4 patches
        >>> loss = head.loss(latents, torch.randint(8192, (1, 4)), mask=torch.tensor([[[1, 0], [1, 0]]]))
        >>> loss.shape
        torch.Size([])
    """

    values_checked = False

    def __init__(self, *args, max_masked: int | None = None, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.max_masked = max_masked

    def loss(
        self,
        latents: Float[Tensor, "batch token dim"],
        targets: Int[Tensor, "batch patch"] | Float[Tensor, "batch vocab height width"],
        mask: Int[Tensor, "batch height width"] | Bool[Tensor, "batch height width"],
    ) -> Float[Tensor, ""]:
        """Cross-entropy over the patches whose mask is not zero, in nats.

        The class token's latent comes first; targets are as `token_ids` takes them.

        Raises:
            ValueError: more patches are masked than `max_masked` (seen always on CPU, at first elsewhere).
        """
        masked = mask.flatten(1).bool()  # B N-1
        if self.max_masked is not None and should_check_values(self, masked):
            num_masked = int(masked.sum(1).max())
            if num_masked > self.max_masked:
                raise ValueError(f"{num_masked} patches of an image are masked, max_masked={self.max_masked}")
            self.values_checked = True

        # As many patches of each image, the masked ones first; those that are not masked do not count.
        order = masked.byte().argsort(dim=1, descending=True, stable=True)  # B N-1
        patches = order[:, : self.max_masked]  # B m
        rows = latents[:, 1:].gather(1, patches[..., None].expand(-1, -1, latents.shape[-1]))  # B m D
        tokens = token_ids(targets).gather(1, patches)
        loss, _ = self.cross_entropy(rows, tokens, counted=masked.gather(1, patches))
        return loss


@MODELS.register_module()
class CAETokenHead(CAEHead):
    """MMPretrain's `CAEHead` with token ids as targets; MMPretrain's takes DALL-E logits.

    Examples:
        >>> head = CAETokenHead(loss=dict(type="mmpretrain.CAELoss", lambd=2))
        >>> logits, latents = torch.randn(2, 8192), torch.randn(1, 2, 192)  # of 2 masked patches
        >>> masked = torch.tensor([[True, False, True, False]])
        >>> main, align = head.loss(logits, torch.randint(8192, (1, 4)), latents, latents, masked)
        >>> align  # the predicted latents are the true ones
        tensor(0.)
    """

    def loss(
        self, logits: Tensor, logits_target: Tensor, latent_pred: Tensor, latent_target: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """MMPretrain's losses; the one of the tokens is NaN if an image has none.

        Each image has as many masked patches as predicted latents, so nothing waits for the device to count
        them, as an index by the mask would.
        """
        tokens = token_ids(logits_target)
        order = mask.byte().argsort(dim=1, descending=True, stable=True)  # B N-1, the masked patches first
        targets = tokens.clamp(min=0).gather(1, order[:, : latent_pred.shape[1]])
        main, align = self.loss_module(logits, targets.flatten(), latent_pred, latent_target)
        return main * nan_without_tokens(tokens.flatten()), align
