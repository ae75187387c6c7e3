"""A query stream that starts in a later layer, which only tables need ("PIM, late")."""

import operator
from typing import SupportsIndex

import torch
from torch import Tensor

from mapet_mm.models.backbones.vit import MaPeTPretrainViT
from mapet_mm.models.utils.layout import Layout
from mapet_mm.registry import MODELS
from mapet_mm.utils.precision import product_dtype


@MODELS.register_module()
class LateQueryViT(MaPeTPretrainViT):
    """`MaPeTPretrainViT` whose query stream runs in the last layers only.

    It starts there as a copy of the mask tokens from the layer before, or, without mask tokens ('pim'), as
    the mask token plus position embeddings. This is an extension; in the paper all layers run both streams.

    Args:
        *args: as for `MaPeTPretrainViT`.
        query_from_layer: the first layer, counted from 0, that runs the query stream.
        **kwargs: as for `MaPeTPretrainViT`.

    Raises:
        ValueError: as for `MaPeTPretrainViT`; or there is no such layer, or no query stream.

    Examples:
        >>> vit = LateQueryViT("deit-tiny", 32, cutting_point=2, objective="pim", query_from_layer=8)
        >>> latents, permutation = vit(torch.randn(2, 3, 32, 32))  # 4 patches and the class token
        >>> latents.shape  # of the targets: 2 images, 5 - 2 tokens
        torch.Size([2, 3, 192])
    """

    def __init__(self, *args, query_from_layer: SupportsIndex, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.query_from_layer = operator.index(query_from_layer)
        if not 0 <= self.query_from_layer < len(self.layers):
            raise ValueError(f"query_from_layer={query_from_layer} is outside 0..{len(self.layers) - 1}")
        if "Q" not in self.objective.groups:
            raise ValueError(f"query_from_layer={query_from_layer} needs an objective with a query stream")

    def forward(
        self,
        images: Tensor,
        permutation: Tensor | None = None,
        with_context: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Run the content stream, then both; arguments and results are as for `MaPeTPretrainViT`."""
        permutation = self.checked_permutation(images, permutation)
        tokens = self.embed(images, permutation)  # B C|M|T|Q D
        layout = self.layout.to(product_dtype(tokens))
        content = without_queries(layout)
        tokens, queries = tokens.split([content.num_rows, self.num_targets], dim=1)
        *layers, last_layer = self.layers

        # The first layers run C, M and T alone.
        for layer in layers[: self.query_from_layer]:
            tokens = layer.two_streams(tokens, content)

        # The queries start from the mask tokens of here if there are any, else from those of the input.
        if "M" in self.objective.groups:
            queries = tokens[:, content.rows_of("M")]
        tokens = torch.cat([tokens, queries], dim=1)  # B C|M|T|Q D
        for layer in layers[self.query_from_layer :]:
            tokens = layer.two_streams(tokens, layout)

        return self.last_latents(tokens, last_layer, layout, None, with_context), permutation


def without_queries(layout: Layout) -> Layout:
    """The layout without the rows of Q, to which nobody attends: the other groups' masks are the same."""
    num_queries = layout.sizes[-1]
    return Layout(
        layout.objective,
        sizes=(*layout.sizes[:-1], 0),
        padded_bias=layout.padded_bias[:-num_queries],
        ranks=layout.ranks[:-num_queries],
    )
