"""The layout `C | M | T | Q` of a permuted sequence: where each group is, and who of T and Q sees whom."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mapet_mm.models.utils.objectives import Objective, group_sizes, visibility

# CUDA's memory-efficient attention copies a mask whose rows are not this many elements apart, in every call.
ALIGNMENT = 8


@dataclass(eq=False)  # no NamedTuple: PyTorch 2.6, the oldest that we support, compiles none with properties
class Layout:
    """Rows of each group of an objective, and the keys that T and Q see."""

    objective: Objective
    sizes: tuple[int, ...]  # rows of each group
    padded_bias: Tensor  # `bias` with the keys filled up to a multiple of 8
    ranks: Tensor  # L, for each row the rank in the permutation of the token that it stands for

    @property
    def num_rows(self) -> int:
        """Rows of all groups."""
        return sum(self.sizes)

    @property
    def num_dense(self) -> int:
        """Rows of C and M, which come first, see each other in full and nothing else."""
        return self._num_rows_of(self.objective.dense_groups)

    @property
    def num_keys(self) -> int:
        """Rows of C, M and T, which come before Q and give keys and values."""
        return self._num_rows_of(self.objective.key_groups)

    @property
    def bias(self) -> Float[Tensor, "stream key"]:
        """For each row of T and Q 0 where it sees a key, else minus infinity."""
        return self.padded_bias[:, : self.num_keys]

    def rows_of(self, group: str) -> slice:
        """The rows of a group."""
        index = self.objective.groups.index(group)
        start = sum(self.sizes[:index])
        return slice(start, start + self.sizes[index])

    def to(self, dtype: torch.dtype) -> "Layout":
        """The layout with its bias in the precision of the attention."""
        return Layout(self.objective, self.sizes, self.padded_bias.to(dtype), self.ranks)

    def _num_rows_of(self, groups: str) -> int:
        sizes = zip(self.objective.groups, self.sizes, strict=True)
        return sum(size for group, size in sizes if group in groups)


def build_layout(objective: Objective, num_context: int, num_targets: int) -> Layout:
    """The layout of whole sequences; arguments are as for `visibility`."""
    sizes = tuple(group_sizes(objective.groups, num_context, num_targets))

    # C stands for the first tokens of the permutation; M, T and Q each for the tokens after them.
    context, targets = torch.arange(num_context + num_targets).split([num_context, num_targets])
    ranks = torch.cat([context if group == "C" else targets for group in objective.groups])

    # Only T and Q need a mask: C and M see each other in full.
    layout = Layout(objective, sizes, torch.empty(0), ranks)
    sees = visibility(objective, num_context, num_targets)[layout.num_dense :]
    bias = torch.zeros(sees.shape).masked_fill(~sees, float("-inf"))
    return Layout(objective, sizes, F.pad(bias, (0, -layout.num_keys % ALIGNMENT)), ranks)
