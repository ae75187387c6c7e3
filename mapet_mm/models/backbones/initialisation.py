"""The authors' initial weights."""

from mmengine.model.weight_init import trunc_normal_
from torch import Tensor

STD = 0.02
# The authors truncate at +-2: no truncation at this standard deviation. Sampling by the inverse error
# function gives about one infinity in 2^24 draws, clamped to the bound, so the bound has to be harmless.
BOUND = 10 * STD


def init_truncated_normal(tensor: Tensor) -> None:
    """Fill linear weights, position embeddings or mask tokens in place: normal, standard deviation 0.02."""
    trunc_normal_(tensor, std=STD, a=-BOUND, b=BOUND)
