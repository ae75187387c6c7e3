"""The two-stream forward of a whole Vision Transformer of any library (paper, Section 4.1)."""

import operator
from collections.abc import Sequence
from math import prod
from typing import Any, SupportsIndex

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from mapet_mm.models.utils.layout import Layout, lay_out
from mapet_mm.models.utils.objectives import get_objective
from mapet_mm.models.utils.permutation import check_order
from mapet_mm.models.utils.value_checks import should_check_values
from mapet_mm.utils.precision import product_dtype


class TwoStreamViT(nn.Module):
    """A Vision Transformer's two-stream forward: the first base of a class, the library's ViT the second.

    The tokens are permuted once, at the input, and laid out `C | M | T | Q` (see
    `mapet_mm.models.utils.objectives`). From there on every mask is one constant, for all images, layers and
    heads, and every layer runs once on the whole layout: the streams share all weights.

    The ViT has `layers` (each a `TwoStreamLayer`), `img_size`, `patch_resolution`, `num_extra_tokens`,
    `embed_dims`, a class token and a final norm. The methods `stem`, `enter`, `attention_positions` and
    `leave` suit MMPretrain's ViTs; other libraries' override them.

    Args:
        *args: as for the library's ViT.
        cutting_point: number of tokens of the permuted sequence that are context, including the extra tokens
            (class token, registers); below `N`, the number of patches plus extra tokens.
        objective: 'mapet' | 'pim' | 'mim'.
        query_from_layer: the first layer that runs the query stream. It starts there as a copy of the mask
            tokens from the layer before, or, without mask tokens ('pim'), as the mask token plus position
            embeddings. This is an extension; 0 is the paper's method.
        **kwargs: as for the library's ViT.

    Raises:
        ValueError: the objective is not known, no patch would be left to predict or to see, or there is no
            layer for the query stream to start from, or no query stream.
    """

    _checked = False
    num_extra_tokens: int
    patch_resolution: Sequence[int]
    layers: Sequence[nn.Module]

    def __init__(
        self,
        *args: Any,
        cutting_point: SupportsIndex,
        objective: str = "mapet",
        query_from_layer: SupportsIndex = 0,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.objective = get_objective(objective)
        self.query_from_layer = operator.index(query_from_layer)
        if not 0 <= self.query_from_layer < len(self.layers):
            raise ValueError(f"query_from_layer={query_from_layer} is outside 0..{len(self.layers) - 1}")
        if self.query_from_layer and "Q" not in self.objective.groups:
            raise ValueError(f"query_from_layer={query_from_layer} needs an objective with a query stream")
        self.num_tokens = self.num_extra_tokens + prod(self.patch_resolution)
        self.cutting_point = operator.index(cutting_point)
        if not self.num_extra_tokens <= self.cutting_point < self.num_tokens:
            raise ValueError(
                f"cutting_point={cutting_point} is outside {self.num_extra_tokens}..{self.num_tokens - 1}"
            )
        self.num_targets = self.num_tokens - self.cutting_point

        self.mask_token = nn.Parameter(torch.zeros(1, 1, self.embed_dims))
        layout = lay_out(self.objective, self.cutting_point, self.num_targets)
        self.group_sizes = layout.sizes
        # The only mask there is: of the rows T and Q over the keys C | M | T. No checkpoint has it.
        self.register_buffer("stream_bias", layout.padded_bias, persistent=False)
        self.register_buffer("row_places", layout.places, persistent=False)

    @property
    def layout(self) -> Layout:
        """The rows of each group in the layout, and the keys that T and Q see."""
        return Layout(self.objective, self.group_sizes, self.stream_bias, self.row_places)

    def sample_permutation(
        self, batch_size: int, device: torch.device | str, generator: torch.Generator | None = None
    ) -> Int64[Tensor, "batch token"]:
        """Draw one uniform random order of the patches per image; the extra tokens always come first.

        Of the result, `(B, N)`, `permutation[b, t]` is the token at place `t`; 0 is the class token.
        """
        extra = self.num_extra_tokens
        keys = torch.rand(batch_size, self.num_tokens - extra, device=device, generator=generator)
        first = torch.arange(extra, device=device).expand(batch_size, -1)
        return torch.cat([first, keys.argsort(1) + extra], dim=1)  # B N

    def forward(
        self,
        images: Float[Tensor, "batch channel height width"],
        permutation: Int64[Tensor, "batch token"] | None = None,
        predicted: Int64[Tensor, " predicted"] | None = None,
    ) -> tuple[Float[Tensor, "batch target dim"], Int64[Tensor, "batch token"]]:
        """Embed the targets.

        Args:
            images: `(B, 3, H, W)`, normalised, of the size that the model was built for.
            permutation: `(B, N)` int64, the extra tokens (0 is the class token) first; drawn on the images'
                device if None.
            predicted: `(m,)` int64, the targets to predict, of `N-c` in permuted order; all if None.

        Returns:
            The predicting group's outputs after the final norm, `(B, N-c, D)` or `(B, m, D)`: the `i`-th
            belongs to the token `permutation[:, c + i]`. And the permutation, `(B, N)`.

        Raises:
            ValueError: images or permutation have another size than the model's; or a row is no order of all
                tokens with the extra ones first (seen always on CPU, in the first batch elsewhere).
        """
        if (size := tuple(images.shape[-2:])) != tuple(self.img_size):
            raise ValueError(f"images of {size} pixels, but the backbone's img_size is {self.img_size}")
        if permutation is None:
            permutation = self.sample_permutation(images.shape[0], images.device)
        elif permutation.shape != (len(images), self.num_tokens):
            raise ValueError(f"permutation has shape {tuple(permutation.shape)} for {self.num_tokens} tokens")
        elif should_check_values(self, permutation):
            check_order(permutation, self.num_extra_tokens)
            self._checked = True
        tokens = self.embed(images, permutation)  # B C|M|T|Q D
        layout = self.layout.to(product_dtype(tokens))  # once for all layers
        queries_apart = "Q" in self.objective.groups  # MIM's mask tokens, which predict, are keys as well
        if predicted is not None and queries_apart:
            content, queries = tokens.tensor_split([layout.slice_of("Q").start], dim=1)
            tokens, layout = torch.cat([content, queries[:, predicted]], dim=1), layout.keep(predicted)
        # A slice of a ModuleList would be a new module, which torch.compile refuses.
        *layers, last_layer = self.layers
        if first := self.query_from_layer:  # C, M and T alone
            content = layout.keep(layout.places[:0])
            positions = self.attention_positions(permutation, content)
            tokens, queries = tokens.tensor_split([content.num_rows], dim=1)
            for layer in layers[:first]:
                tokens = layer(tokens, content, 0, positions)
            if "M" in self.objective.groups:  # the queries go on from the mask tokens
                queries = tokens[:, content.slice_of("M")]
                queries = queries if predicted is None else queries[:, predicted]
            tokens = torch.cat([tokens, queries], dim=1)  # B C|M|T|Q D
        positions = self.attention_positions(permutation, layout)
        for layer in layers[first:]:
            tokens = layer(tokens, layout, 0, positions)
        # Beyond the last layer only the predictions count; the other groups still give it keys and values.
        first_row = layout.slice_of(self.objective.predicting_group).start
        latents = last_layer(tokens, layout, first_row, positions)
        if predicted is not None and not queries_apart:
            latents = latents[:, predicted]
        return self.leave(latents), permutation

    def encode(self, images: Float[Tensor, "batch channel height width"]) -> tuple[Tensor, ...]:
        """Features `(B, N, D)` of whole images, none masked: the library's own forward pass."""
        return super().forward(images)

    def embed(
        self, images: Float[Tensor, "batch channel height width"], permutation: Int64[Tensor, "batch token"]
    ) -> Float[Tensor, "batch layout dim"]:
        """Embed the patches, permute the tokens and lay them out in the objective's groups, `(B, L, D)`."""
        tokens, positions = self.stem(images)  # B N D, 1 N D
        if positions is not None:
            tokens = tokens + positions
        tokens = tokens.gather(1, permutation[..., None].expand_as(tokens))
        context, targets = tokens.split([self.cutting_point, self.num_targets], dim=1)
        if positions is None:
            masks = self.mask_token.expand_as(targets)
        else:  # a position embedding travels with its token, so each mask token stands where its target does
            masks = self.mask_token + positions[0][permutation[:, self.cutting_point :]]  # B n D
        start = {"C": context, "M": masks, "T": targets, "Q": masks}
        tokens = torch.cat([start[group] for group in self.objective.groups], dim=1)  # B L D
        return self.enter(tokens)

    def stem(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Extra tokens and patches `(B, N, D)`, and the position embeddings `(1, N, D)` to add to them."""
        patches, _ = self.patch_embed(images)  # B N-1 D
        class_token = self.cls_token.expand(images.shape[0], -1, -1)  # B 1 D
        return torch.cat([class_token, patches], dim=1), self.pos_embed

    def enter(self, tokens: Tensor) -> Tensor:
        """Dropout and norm between the embedding and the first layer."""
        return self.pre_norm(self.drop_after_pos(tokens))

    def attention_positions(self, permutation: Tensor, layout: Layout) -> Any:
        """The rows' places in each image, as the layers' attention takes them; None if it takes none.

        Row `r` of the layout holds token `permutation[:, layout.places[r]]`, its mask or its query.
        """
        return None

    def leave(self, latents: Tensor) -> Tensor:
        """The final norm."""
        return self.ln1(latents)
