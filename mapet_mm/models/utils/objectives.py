"""The rule who may see whom: the pre-training objectives MIM, PIM and MaPeT as three values of one type.

A permuted sequence is laid out in up to four groups, always in this order:

- `C`, the context: the class token and the visible patches (the first `c` tokens, `c` the cutting point);
- `M`, the mask tokens: one learnable vector plus the position embedding of each target;
- `T`, the targets' content: the content stream of the patches after the cutting point;
- `Q`, the query stream, which starts as the same tensor as `M` and predicts the targets' visual tokens.

Keys and values come only from `C`, `M` and `T`: no token attends to the query stream. The last group
predicts. Paper: Section 4.1, the two masks under "Attention masking"; Section 3 for MIM and PIM.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import torch
from jaxtyping import Bool
from torch import Tensor

# What row t of a group sees of a group of keys, as a relation between t and the key's index j.
_Relation = Callable[[Tensor, Tensor], Tensor]


def _everything(t: Tensor, j: Tensor) -> Tensor:
    return torch.ones_like(t + j, dtype=torch.bool)


def _nothing(t: Tensor, j: Tensor) -> Tensor:
    return ~_everything(t, j)


# Rows of the paper's content mask (C, M, T) and query mask (Q), one entry a group of keys. The operators read
# "t <operator> j": a target sees the mask tokens after it (t < j) and the content up to itself (t >= j).
SEES: dict[str, dict[str, _Relation]] = {
    "C": {"C": _everything, "M": _everything, "T": _nothing},
    "M": {"C": _everything, "M": _everything, "T": _nothing},
    "T": {"C": _everything, "M": operator.lt, "T": operator.ge},
    "Q": {"C": _everything, "M": operator.le, "T": operator.gt},
}


@dataclass(frozen=True)
class Objective:
    """A pre-training objective: its token groups, a subset of `"CMTQ"` in that order; the last one predicts.

    Rows of T and Q may follow another rule than the paper's: `sees`, a table such as `SEES`.

    Raises:
        ValueError: other groups, or the targets' content last, which has seen what it would predict; or
            groups without a mask that `sees` does not describe as dense.

    Examples:
        >>> Objective("mapet", groups="CMTQ").predicting_group
        'Q'
        >>> visibility(PIM, num_context=1, num_targets=2).int()  # rows C T T Q Q, keys C T T
        tensor([[1, 0, 0],
                [1, 1, 0],
                [1, 1, 1],
                [1, 0, 0],
                [1, 1, 0]], dtype=torch.int32)
    """

    name: str
    groups: str
    sees: dict[str, dict[str, _Relation]] = field(default_factory=lambda: SEES, repr=False, compare=False)

    def __post_init__(self) -> None:
        in_order = "".join(group for group in SEES if group in self.groups)
        if self.groups != in_order or self.groups[:1] != "C" or self.groups[-1:] == "T":
            raise ValueError(
                f"objective {self.name!r} has groups={self.groups!r}: a subset of {''.join(SEES)!r} in this "
                "order, which begins with C and does not end with T (it has seen its own content)"
            )
        for row, key in product(self.dense_groups, self.key_groups):
            if self.sees[row][key] is not (_everything if key in self.dense_groups else _nothing):
                raise ValueError(
                    f"sees[{row!r}][{key!r}] would not be heeded: {self.dense_groups} attend without a mask, "
                    "to all of each other and to nothing else (`Objective.dense_groups`)"
                )

    @property
    def dense_groups(self) -> str:
        """The groups that attend only to themselves and in full, so without a mask (`C`, or `C` and `M`)."""
        return "".join(group for group in self.groups if group in "CM")

    @property
    def key_groups(self) -> str:
        """The groups that give keys and values: all but the query stream."""
        return self.groups.replace("Q", "")

    @property
    def predicting_group(self) -> str:
        """The group whose outputs predict the targets' tokens; C, where something else predicts them."""
        return self.groups[-1]


MIM = Objective("mim", groups="CM")
PIM = Objective("pim", groups="CTQ")
MAPET = Objective("mapet", groups="CMTQ")
OBJECTIVES = {objective.name: objective for objective in (MAPET, PIM, MIM)}
# Not an objective by itself: an encoder of the visible patches, for an algorithm with a predictor of its own.
CONTEXT = Objective("context", groups="C")


def get_objective(name: str) -> Objective:
    """The objective of a name: one of `OBJECTIVES`, or `CONTEXT`.

    Raises:
        ValueError: there is none of this name.
    """
    known = {**OBJECTIVES, CONTEXT.name: CONTEXT}
    if name not in known:
        raise ValueError(f"objective={name!r} is not known; choose one of {', '.join(known)}")
    return known[name]


def group_sizes(groups: str, num_context: int, num_targets: int) -> list[int]:
    """Number of tokens in each group: the cutting point for `C`, the number of targets for the others."""
    return [num_context if group == "C" else num_targets for group in groups]


def visibility(objective: Objective, num_context: int, num_targets: int) -> Bool[Tensor, "rows keys"]:
    """True where a row of the whole layout, `(rows, keys)`, may attend to a key.

    Rows are the objective's groups in layout order, keys its key groups in the same order. The context is the
    cutting point `c`, which counts the class token; the number of targets is `N - c`.
    """

    def block(row: str, key: str) -> Tensor:
        num_rows, num_keys = group_sizes(row + key, num_context, num_targets)
        t = torch.arange(num_rows)[:, None]
        j = torch.arange(num_keys)[None, :]
        return objective.sees[row][key](t, j)

    rows = []
    for row in objective.groups:
        rows.append(torch.cat([block(row, key) for key in objective.key_groups], dim=1))
    return torch.cat(rows)
