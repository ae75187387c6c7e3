"""The two-stream forward of a whole Vision Transformer of any library (paper, Section 4.1)."""

import operator
from collections.abc import Sequence
from math import prod
from typing import Any, SupportsIndex

import torch
from jaxtyping import Float, Int64, Shaped
from mmengine.logging import print_log
from torch import Tensor, nn

from mapet_mm.models.utils.layout import Layout, build_layout
from mapet_mm.models.utils.objectives import CONTEXT, get_objective
from mapet_mm.models.utils.permutation import (
    check_permutation,
    ranked_permutations,
    seeded_permutations,
    should_check_values,
)
from mapet_mm.utils.precision import product_dtype


def keep_mask_token(vit: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """State dict hook: a ViT without a mask token leaves this one's as it is; MMEngine would warn of it."""
    name = f"{prefix}mask_token"
    if name not in state_dict:
        state_dict[name] = vit.mask_token.detach()
        print_log(f"`{name}` starts anew: only pre-training masks patches.", "current")


class TwoStreamViT(nn.Module):
    """A Vision Transformer's two-stream forward: the first base of a class, the library's ViT the second.

    The tokens are permuted once, at the input, and laid out `C | M | T | Q` (see
    `mapet_mm.models.utils.objectives`). From there on every mask is one constant, for all images, layers and
    heads, and every layer runs once on the whole layout: the streams share all weights.

    The ViT has `layers` (each a `TwoStreamLayer`), `img_size`, `patch_resolution`, `num_extra_tokens`,
    `embed_dims`, a class token and a final norm. The methods `embed_patches`, `before_layers`,
    `attention_positions` and `after_layers` suit MMPretrain's ViTs; other libraries' override them.

    Args:
        *args: as for the library's ViT.
        cutting_point: number of tokens of the permuted sequence that are context, including the extra tokens
            (class token, registers); below `N`, the number of patches plus extra tokens.
        objective: 'mapet' | 'pim' | 'mim' | 'context', which encodes the context alone and predicts nothing
            (for `VisibleMIM`).
        **kwargs: as for the library's ViT.

    Raises:
        ValueError: the objective is not known, or no patch would be left to predict or to see.

    Examples:
        >>> from mmpretrain.models.backbones import VisionTransformer
        >>> from mapet_mm.models import MaPeTPretrainViT  # this forward for MMPretrain's ViT
        >>> issubclass(MaPeTPretrainViT, TwoStreamViT) and issubclass(MaPeTPretrainViT, VisionTransformer)
        True
        >>> arch = dict(embed_dims=8, num_layers=1, num_heads=1, feedforward_channels=8)
        >>> vit = MaPeTPretrainViT(arch, img_size=32, cutting_point=3)  # class token and 2 x 2 patches
        >>> vit.num_tokens, vit.num_targets
        (5, 2)
    """

    values_checked = False
    num_extra_tokens: int
    patch_resolution: Sequence[int]
    layers: Sequence[nn.Module]

    def __init__(
        self,
        *args: Any,
        cutting_point: SupportsIndex,
        objective: str = "mapet",
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.objective = get_objective(objective)
        self.num_tokens = self.num_extra_tokens + prod(self.patch_resolution)
        self.cutting_point = operator.index(cutting_point)
        if not self.num_extra_tokens <= self.cutting_point < self.num_tokens:
            raise ValueError(
                f"cutting_point={cutting_point} is outside {self.num_extra_tokens}..{self.num_tokens - 1}"
            )
        self.num_targets = self.num_tokens - self.cutting_point

        self.mask_token = nn.Parameter(torch.zeros(1, 1, self.embed_dims))
        self.register_load_state_dict_pre_hook(keep_mask_token)
        layout = build_layout(self.objective, self.cutting_point, self.num_targets)
        self.group_sizes = layout.sizes
        # The only mask there is: of the rows T and Q over the keys C | M | T. No checkpoint has it.
        self.register_buffer("stream_bias", layout.padded_bias, persistent=False)
        self.register_buffer("row_ranks", layout.ranks, persistent=False)

    @property
    def layout(self) -> Layout:
        """The rows of each group in the layout, and the keys that T and Q see."""
        return Layout(self.objective, self.group_sizes, self.stream_bias, self.row_ranks)

    def sample_permutation(
        self, batch_size: int, device: torch.device | str, generator: torch.Generator | None = None
    ) -> Int64[Tensor, "batch token"]:
        """Draw one uniform random order of the patches per image; the extra tokens always come first.

        Of the result, `(B, N)`, `permutation[b, t]` is the token of rank `t`; 0 is the class token. An
        override of this method decides the order in training and validation as well.
        """
        num_patches = self.num_tokens - self.num_extra_tokens
        ranks = torch.rand(batch_size, num_patches, device=device, generator=generator)
        return ranked_permutations(ranks, self.num_extra_tokens)

    def permutations(
        self,
        seeds: Int64[Tensor, " batch"] | None = None,
        ranks: Shaped[Tensor, "batch patch"] | None = None,
    ) -> Int64[Tensor, "batch token"]:
        """The order of each image's tokens `(B, N)`, on the device of what decides it.

        Args:
            seeds: of each image: the same order on every device and in whatever batch. A subclass with a
                `sample_permutation` of its own draws with a generator of each seed, on the CPU.
            ranks: instead of seeds, a number for each patch, in raster order: the lowest comes first.
        """
        if ranks is not None:
            return ranked_permutations(ranks, self.num_extra_tokens)
        if type(self).sample_permutation is TwoStreamViT.sample_permutation:
            return seeded_permutations(seeds, self.num_tokens, self.num_extra_tokens)
        orders = []
        for seed in seeds.tolist():
            generator = torch.Generator().manual_seed(seed)
            orders.append(self.sample_permutation(1, "cpu", generator))
        return torch.cat(orders).to(seeds.device)

    def forward(
        self,
        images: Float[Tensor, "batch channel height width"],
        permutation: Int64[Tensor, "batch token"] | None = None,
        with_context: bool = False,
    ) -> tuple[Float[Tensor, "batch target dim"], Int64[Tensor, "batch token"]]:
        """Run both streams and return the outputs that predict the targets' tokens.

        Args:
            images: `(B, 3, H, W)`, normalised, of the size that the model was built for.
            permutation: `(B, N)` int64, the extra tokens (0 is the class token) first; drawn on the images'
                device if None.
            with_context: also return the outputs of the patches that are context.

        Returns:
            The predicting group's outputs after the final norm, `(B, N-c, D)`: the `i`-th belongs to the
            token `permutation[:, c + i]`. With the context those of all patches, `(B, N-e, D)`, in the same
            order, `e` being the number of extra tokens. Of the objective 'context' those of the context,
            `(B, c, D)`, the extra tokens first. And the permutation, `(B, N)`.

        Raises:
            ValueError: see `checked_permutation`; or `with_context` of the objective 'context'.
        """
        permutation = self.checked_permutation(images, permutation)
        # Permute once, at the input, and lay the groups out side by side.
        tokens = self.embed(images, permutation)  # B C|M|T|Q D
        layout = self.layout.to(product_dtype(tokens))  # once for all layers
        positions = self.attention_positions(permutation, layout)

        # Both streams in each layer. (A slice of a ModuleList would be a new module, which torch.compile
        # refuses.)
        *layers, last_layer = self.layers
        for layer in layers:
            tokens = layer.two_streams(tokens, layout, 0, positions)
        return self.last_latents(tokens, last_layer, layout, positions, with_context), permutation

    def last_latents(
        self, tokens: Tensor, last_layer: nn.Module, layout: Layout, positions: Any, with_context: bool
    ) -> Float[Tensor, "batch patch dim"]:
        """The last layer and the final norm, for the rows that predict: see `forward`."""
        # After the last layer only the last group's rows count; the others still give it keys and values.
        if not with_context:
            first_row = layout.num_rows - layout.sizes[-1]
            return self.after_layers(last_layer.two_streams(tokens, layout, first_row, positions))

        if self.objective is CONTEXT:
            raise ValueError("with_context=True: objective='context' returns the context anyway")
        # The context comes first, so all rows are computed.
        rows = last_layer.two_streams(tokens, layout, 0, positions)
        # Class token and registers have no visual token.
        context = rows[:, self.num_extra_tokens : self.cutting_point]
        targets = rows[:, layout.num_rows - layout.sizes[-1] :]
        return self.after_layers(torch.cat([context, targets], dim=1))

    def checked_permutation(
        self, images: Float[Tensor, "batch channel height width"], permutation: Tensor | None
    ) -> Int64[Tensor, "batch token"]:
        """The permutation of a forward pass: the given one, or one that is drawn.

        Raises:
            ValueError: images or permutation have another size than the model's; or a row of the permutation
                is not one of all tokens with the extra ones first (seen always on CPU, in the first batch
                elsewhere).
        """
        size = tuple(images.shape[-2:])
        if size != tuple(self.img_size):
            raise ValueError(f"images of {size} pixels, but the backbone's img_size is {self.img_size}")
        if permutation is None:
            return self.sample_permutation(images.shape[0], images.device)
        if permutation.shape != (len(images), self.num_tokens):
            raise ValueError(f"permutation has shape {tuple(permutation.shape)} for {self.num_tokens} tokens")
        if should_check_values(self, permutation):
            check_permutation(permutation, self.num_extra_tokens)
            self.values_checked = True
        return permutation

    def encode(self, images: Float[Tensor, "batch channel height width"]) -> tuple[Tensor, ...]:
        """Features `(B, N, D)` of whole images, none masked: the library's own forward pass."""
        return super().forward(images)

    def embed(
        self, images: Float[Tensor, "batch channel height width"], permutation: Int64[Tensor, "batch token"]
    ) -> Float[Tensor, "batch layout dim"]:
        """Embed the patches, permute the tokens and lay them out in the objective's groups, `(B, L, D)`."""
        tokens, positions = self.embed_patches(images)  # B N D, 1 N D
        if positions is not None:
            tokens = tokens + positions
        # Permute the tokens and cut the sequence: B c D and B N-c D.
        tokens = tokens.gather(1, permutation[..., None].expand_as(tokens))
        context, targets = tokens.split([self.cutting_point, self.num_targets], dim=1)
        # One mask token for each target; the query stream starts as the same tensor.
        if positions is None:
            masks = self.mask_token.expand_as(targets)
        else:  # a position embedding travels with its token, so each mask token stands where its target does
            # (Gathered from one copy an image: an index's gradient would sort all images' positions.)
            of_targets = permutation[:, self.cutting_point :, None].expand_as(targets)  # B n D
            masks = self.mask_token + positions.expand_as(tokens).gather(1, of_targets)  # B n D
        start = {"C": context, "M": masks, "T": targets, "Q": masks}
        tokens = torch.cat([start[group] for group in self.objective.groups], dim=1)  # B L D
        return self.before_layers(tokens)

    def embed_patches(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Extra tokens and patches `(B, N, D)`, and the position embeddings `(1, N, D)` to add to them."""
        patches, _ = self.patch_embed(images)  # B N-1 D
        class_token = self.cls_token.expand(images.shape[0], -1, -1)  # B 1 D
        return torch.cat([class_token, patches], dim=1), self.pos_embed

    def before_layers(self, tokens: Tensor) -> Tensor:
        """Dropout and norm between the embedding and the first layer."""
        return self.pre_norm(self.drop_after_pos(tokens))

    def attention_positions(self, permutation: Tensor, layout: Layout) -> Any:
        """The rows' positions in each image, as the layers' attention takes them; None if it takes none.

        Row `r` of the layout holds token `permutation[:, layout.ranks[r]]`, its mask or its query.
        """
        return None

    def after_layers(self, latents: Tensor) -> Tensor:
        """The final norm."""
        return self.ln1(latents)
