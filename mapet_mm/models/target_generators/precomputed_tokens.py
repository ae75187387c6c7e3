"""A target generator that reads stored tokens, so no tokenizer runs during pre-training."""

from __future__ import annotations

from jaxtyping import Int
from mmengine.model import BaseModule
from torch import Tensor

from mapet_mm.models.utils.permutation import should_check_values
from mapet_mm.registry import MODELS


@MODELS.register_module()
class PrecomputedTokens(BaseModule):
    """Target generator that flattens the token grids of a token store to token ids in raster order.

    Args:
        vocab_size: number of token ids that the head predicts; ids must be below it.

    Examples:
        >>> PrecomputedTokens(vocab_size=8192)(torch.randint(8192, (2, 14, 14))).shape
        torch.Size([2, 196])
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.values_checked = False

    def forward(self, token_grids: Int[Tensor, "batch height width"]) -> Int[Tensor, "batch grid"]:
        """Token ids (B, HW), int64, of token grids (B, H, W); ValueError if one is outside the vocabulary."""
        tokens = token_grids.flatten(1).long()
        if should_check_values(self, tokens):
            lowest, highest = (int(bound) for bound in tokens.aminmax())
            if lowest < 0 or highest >= self.vocab_size:
                raise ValueError(
                    f"token ids {lowest} to {highest} are outside 0..{self.vocab_size - 1}: "
                    "set `target_generator.vocab_size` and the head's to the token store's"
                )
            self.values_checked = True
        return tokens
