"""MaPeT, the pre-training algorithm."""

import torch
from jaxtyping import Float, Int64, Shaped
from mmengine.logging import print_log
from mmpretrain.models.selfsup.base import BaseSelfSupervisor
from mmpretrain.structures import DataSample
from torch import Tensor

from mapet_mm.models.backbones.two_stream_vit import TwoStreamViT
from mapet_mm.models.target_generators.token_ids import token_ids
from mapet_mm.models.utils.low_rank import add_adapters
from mapet_mm.models.utils.objectives import CONTEXT
from mapet_mm.registry import MODELS
from mapet_mm.utils.splitmix import DRAW_SEED, splitmix_of_tensor

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number
# Parts of the names of a backbone's parameters that are trained.
TRAINED = {
    "all": ("",),
    "attention": ("attn.proj.", "mask_token"),
    "lora": ("parametrizations.weight.0.", "mask_token"),  # the adapters that `add_adapters` gives it
}


@MODELS.register_module()
class MaPeT(BaseSelfSupervisor):
    """Masked and permuted pre-training: predict the visual tokens of the patches after the cutting point.

    With the backbone's objectives 'pim' and 'mim' it trains Permuted and Masked Image Modeling.

    Args:
        backbone: a `MaPeTPretrainViT` or `MaPeTPretrainTIMM`; also as the `module` of MMPretrain's
            `LoRAModel`.
        head: a `mapet_mm.models.heads.token_prediction_head.TokenPredictionHead`.
        target_generator: gives the tokens: `PrecomputedTokens`, `KCLIP`, or MMPretrain's `VQKD` or
            `DALL-E`; always in evaluation mode. None for a model that only gives features.
        data_preprocessor: gives a list of the images `(B, 3, H, W)` and what the target generator takes
            (stored token grids, or a second view of the images).
        context_loss: weight of a second cross-entropy, for the tokens of the visible patches; 0 is the
            paper's. An extension, as V-JEPA 2.1 (arXiv 2603.14482) has it for its own targets.
        train_backbone: 'all'; 'attention': of the backbone only each layer's output projection of the
            attention, and the mask token, as APLA (arXiv 2503.18873) has it; or 'lora': low-rank adapters of
            the attention's projections (see `mapet_mm.models.utils.low_rank`), and the mask token. The two
            last are for weights that are continued.
        **kwargs: as for MMPretrain's algorithms: `init_cfg`.

    Raises:
        ValueError: a backbone without a two-stream forward, or with the objective 'context', which predicts
            nothing; a target generator with a larger vocabulary than the head's; or a `context_loss` without
            a visible patch.

    Examples:
        >>> vit = dict(type="mapet_mm.MaPeTPretrainViT", arch="deit-tiny", img_size=32, cutting_point=2)
        >>> model = MaPeT(
        ...     backbone=vit,
        ...     head=dict(type="mapet_mm.TokenPredictionHead", embed_dims=192, vocab_size=64),
        ...     target_generator=dict(type="mapet_mm.PrecomputedTokens", vocab_size=64),
        ... )
        >>> images, token_grids = torch.randn(2, 3, 32, 32), torch.randint(64, (2, 2, 2))
        >>> losses = model([images, token_grids], mode="loss")
        >>> sorted(losses)
        ['loss', 'token_accuracy']
    """

    encodes_context_only = False  # the backbone predicts the targets itself

    def __init__(
        self,
        backbone: dict,
        head: dict,
        target_generator: dict | None,
        data_preprocessor: dict | None = None,
        context_loss: float = 0.0,
        train_backbone: str = "all",
        **kwargs,
    ) -> None:
        parts = dict(head=head, target_generator=target_generator, data_preprocessor=data_preprocessor)
        super().__init__(backbone=backbone, **parts, **kwargs)
        # MMPretrain's LoRAModel has it as `module`, and passes all on to it.
        vit = getattr(self.backbone, "module", self.backbone)
        if not isinstance(vit, TwoStreamViT):
            raise ValueError(f"{type(vit).__name__} has no two-stream forward: take a MaPeTPretrain...")
        if (vit.objective is CONTEXT) != self.encodes_context_only:
            raise ValueError(
                f"{type(self).__name__} does not train a backbone of objective={vit.objective.name!r}"
            )
        vocab_size = getattr(self.target_generator, "vocab_size", 0)
        if vocab_size > self.head.vocab_size:
            raise ValueError(f"the target generator's vocab_size={vocab_size} is larger than the head's")
        if context_loss and vit.cutting_point == vit.num_extra_tokens:
            raise ValueError(
                f"context_loss={context_loss}, but with cutting_point={vit.cutting_point} no patch is seen"
            )
        self.context_loss = context_loss
        self.freeze(vit, train_backbone)

    def freeze(self, vit: TwoStreamViT, train_backbone: str) -> None:
        """Leave only these parameters of the backbone to be trained (see the class)."""
        if train_backbone not in TRAINED:
            raise ValueError(f"train_backbone={train_backbone!r}: {' or '.join(TRAINED)}")
        if train_backbone == "all":
            return
        if train_backbone == "lora":
            add_adapters(self)
        num_trained = 0
        for name, parameter in vit.named_parameters():
            is_trained = any(part in name for part in TRAINED[train_backbone])
            parameter.requires_grad_(is_trained and parameter.requires_grad)
            num_trained += parameter.requires_grad * parameter.numel()
        total = sum(parameter.numel() for parameter in vit.parameters())
        print_log(
            f"train_backbone={train_backbone!r}: {num_trained:,} of the backbone's {total:,} parameters are "
            "trained, and all others of the model",
            "current",
        )

    def train(self, mode: bool = True) -> "MaPeT":
        """Set the mode; the target generator stays in evaluation mode, or VQ-KD would keep learning."""
        super().train(mode)
        if self.with_target_generator:
            self.target_generator.eval()
        return self

    def forward(
        self,
        inputs: Tensor | list[Tensor],
        data_samples: list[DataSample] | None = None,
        mode: str = "tensor",
    ) -> tuple | dict[str, Tensor] | list[DataSample]:
        """Run the model: MMPretrain's modes 'tensor' and 'loss', and 'predict' for validation."""
        if mode == "tensor":
            return self.latents(images_of(inputs), None)
        if isinstance(inputs, Tensor) or not self.with_target_generator:
            raise ValueError(f"mode '{mode}' needs tokens: a `target_generator`, LoadTokenGrid or MultiView")
        if mode == "predict":
            return self.predict(inputs, data_samples)
        return super().forward(inputs, data_samples, mode)

    def extract_feat(self, inputs: Tensor | list[Tensor]) -> tuple[Tensor, ...]:
        """Features `(B, N, D)` of whole images, none masked: the backbone as a plain ViT."""
        return self.backbone.encode(images_of(inputs))

    def loss(self, inputs: list[Tensor], data_samples: list[DataSample] | None = None) -> dict[str, Tensor]:
        """Loss and token accuracy of a batch, with a permutation drawn per image (see the class).

        Where the loader seeds each image (`EpochSeedHook`), its permutation comes from that seed.

        Returns:
            `loss`, in nats, and `token_accuracy` of the targets, in percent. With a `context_loss`, `loss` is
            `target_nats + context_loss * context_nats`, and these and `context_accuracy` are there as well.
        """
        images = images_of(inputs)
        permutation = None  # drawn by the backbone
        seeds = [sample.get(DRAW_SEED) for sample in data_samples or ()]
        if seeds and None not in seeds:
            seeds = torch.tensor(seeds, pin_memory=images.is_cuda)  # only from there GPUs copy asynchronously
            permutation = self.backbone.permutations(seeds.to(images.device, non_blocking=True))
        if self.context_loss:
            return self.loss_with_context(images, inputs[1], permutation)
        latents, permutation = self.latents(images, permutation)  # B N-c D
        tokens = self.target_tokens(inputs[1], permutation)  # B N-c
        return self.head.loss(latents, tokens)

    def loss_with_context(
        self, images: Tensor, target_inputs: Tensor, permutation: Tensor | None
    ) -> dict[str, Tensor]:
        """The losses of all patches, those of the context weighted: see `loss`."""
        latents, permutation = self.latents(images, permutation, with_context=True)  # B N-e D
        tokens = self.target_tokens(target_inputs, permutation, with_context=True)  # B N-e
        sizes = [tokens.shape[1] - self.backbone.num_targets, self.backbone.num_targets]
        context, targets = latents.split(sizes, dim=1)
        context_tokens, target_tokens = tokens.split(sizes, dim=1)

        of_context = self.head.loss(context, context_tokens)
        losses = self.head.loss(targets, target_tokens)
        return {
            "loss": losses["loss"] + self.context_loss * of_context["loss"],
            "target_nats": losses["loss"].detach(),
            "context_nats": of_context["loss"].detach(),
            "token_accuracy": losses["token_accuracy"],
            "context_accuracy": of_context["token_accuracy"],
        }

    def latents(
        self, images: Tensor, permutation: Tensor | None, with_context: bool = False
    ) -> tuple[Float[Tensor, "batch patch dim"], Int64[Tensor, "batch token"]]:
        """What the head gets, and the permutation: of the targets, with the context of all patches.

        Both in permuted order, as the backbone's `forward` returns them.
        """
        if not with_context:  # a backbone of one's own need not have this option
            return self.backbone(images, permutation)
        return self.backbone(images, permutation, with_context=True)

    @torch.no_grad()
    def predict(self, inputs: list[Tensor], data_samples: list[DataSample] | None = None) -> list[DataSample]:
        """Evaluate a batch: `token_loss` (nats) and `token_accuracy` (percent) in each data sample."""
        images = images_of(inputs)
        # The same one in every validation, in whichever batch an image comes.
        permutation = self.backbone.permutations(image_seeds(images))
        latents, _ = self.latents(images, permutation)
        losses, accuracies = self.head.evaluate(latents, self.target_tokens(inputs[1], permutation))
        data_samples = data_samples or [DataSample() for _ in images]
        for sample, loss, accuracy in zip(data_samples, losses.tolist(), accuracies.tolist(), strict=True):
            sample.set_field(loss, "token_loss")
            sample.set_field(accuracy, "token_accuracy")
        return data_samples

    @torch.no_grad()
    def target_tokens(
        self, target_inputs: Tensor, permutation: Tensor, with_context: bool = False
    ) -> Int64[Tensor, "batch patch"]:
        """The token of each target, or with the context of each patch, in permuted order."""
        tokens = token_ids(self.target_generator(target_inputs))
        extra = self.backbone.num_extra_tokens
        num_patches = self.backbone.num_tokens - extra
        if tokens.shape != (len(permutation), num_patches):
            raise ValueError(f"tokens of shape {tuple(tokens.shape)} for {num_patches} patches per image")
        # The i-th target is token p of rank c + i in the permutation: patch p - 1 after one class token.
        first_rank = extra if with_context else self.backbone.cutting_point
        patches = permutation[:, first_rank:] - extra
        return tokens.gather(1, patches)


def images_of(inputs: Tensor | list[Tensor]) -> Tensor:
    """The images that a data preprocessor hands on: alone, or first in a list."""
    return inputs if isinstance(inputs, Tensor) else inputs[0]


def image_seeds(images: Shaped[Tensor, "batch channel height width"]) -> Int64[Tensor, " batch"]:
    """A number below 2^32 for each image, which depends on all its values and on nothing else.

    The upper half of a sum of products modulo 2^64: integers, so the same in any order of summation.
    """
    bits = images.contiguous().flatten(1).view(INTEGERS[images.element_size()]).long()  # B 3HW
    indices = torch.arange(1, bits.shape[1] + 1, device=images.device)
    coefficients = splitmix_of_tensor(torch.zeros_like(indices), indices)
    return ((bits * coefficients).sum(1) >> 32) & 0xFFFFFFFF
