"""Who may see whom, by value."""

import operator
from dataclasses import FrozenInstanceError

import pytest
import torch

from mapet_mm.models.utils.objectives import MAPET, MIM, PIM, SEES, Objective, get_objective, visibility


def rows_of(text: str) -> torch.Tensor:
    return torch.tensor([[c == "x" for c in line if c in "x."] for line in text.split()])


def test_mapet_visibility_is_the_table_of_the_method():
    """Two context tokens, three targets; keys C | M | T, rows C | M | T | Q."""
    expected = rows_of(
        """
        xx|xxx|...  xx|xxx|...
        xx|xxx|...  xx|xxx|...  xx|xxx|...
        xx|.xx|x..  xx|..x|xx.  xx|...|xxx
        xx|xxx|...  xx|.xx|x..  xx|..x|xx.
        """
    )
    assert torch.equal(visibility(MAPET, 2, 3), expected)


def test_pim_visibility_has_no_mask_tokens():
    expected = rows_of("xx|...  xx|...  xx|x..  xx|xx.  xx|xxx  xx|...  xx|x..  xx|xx.")
    assert torch.equal(visibility(PIM, 2, 3), expected)


def test_mim_is_context_and_mask_tokens_in_full():
    assert torch.equal(visibility(MIM, 2, 3), torch.ones(5, 5, dtype=torch.bool))


@pytest.mark.parametrize("objective", [MAPET, PIM], ids=lambda o: o.name)
def test_target_never_sees_its_own_content(objective):
    """Row Q_t: of T only what comes before t, and together with M exactly one key per target (MaPeT)."""
    visible = visibility(objective, 4, 6)
    queries, content = visible[-6:], visible[-6:, -6:]
    assert not content.diagonal().any()
    assert content.sum(1).tolist() == [0, 1, 2, 3, 4, 5]
    assert queries.sum(1).tolist() == ([10] * 6 if objective is MAPET else [4, 5, 6, 7, 8, 9])


def test_the_groups_of_each_objective():
    """Which attend without a mask, which give keys, which predicts; an objective is a value."""
    roles = {o.name: (o.dense_groups, o.key_groups, o.predicting_group) for o in (MAPET, PIM, MIM)}
    assert roles == {"mapet": ("CM", "CMT", "Q"), "pim": ("C", "CT", "Q"), "mim": ("CM", "CM", "M")}
    with pytest.raises(FrozenInstanceError):
        MAPET.groups = "CM"


def test_an_objective_may_bring_its_own_rule():
    """Targets predicted two at a time: T sees its whole pair, Q the pairs before its own."""
    in_pairs = {row: {key: pairwise(SEES[row][key]) for key in "CMT"} for row in "TQ"}
    expected = rows_of(
        """
        xx|xxx|...  xx|xxx|...
        xx|xxx|...  xx|xxx|...  xx|xxx|...
        xx|..x|xx.  xx|..x|xx.  xx|...|xxx
        xx|xxx|...  xx|xxx|...  xx|..x|xx.
        """
    )
    assert torch.equal(visibility(Objective("pairs", "CMTQ", SEES | in_pairs), 2, 3), expected)


def pairwise(relation):
    return lambda t, j: relation(t // 2, j // 2)


@pytest.mark.parametrize("groups", ["CMT", "CTMQ", "MTQ", "CAM", "CMTR", "CQQ", "CT", ""])
def test_groups_that_would_train_something_else_are_refused(groups):
    """T would predict its own content; in another order rows would have other rows' masks."""
    with pytest.raises(ValueError, match=f"groups='{groups}'"):
        Objective("own", groups)


@pytest.mark.parametrize(("row", "key"), ["CT", "MT", "MC", "CM"])
def test_what_the_dense_groups_see_is_not_changed_in_the_table_alone(row, key, monkeypatch):
    """C and M attend without the mask that is made of the table; the drawings would show another method."""
    monkeypatch.setitem(SEES[row], key, operator.ge)
    with pytest.raises(ValueError, match=rf"sees\['{row}'\]\['{key}'\]"):
        Objective("own", "CMTQ")


@pytest.mark.parametrize("groups", ["CM", "CQ", "CMQ", "CTQ", "CMTQ"])
def test_any_other_groups_make_an_objective(groups):
    objective = Objective("own", groups)
    assert visibility(objective, 2, 3).shape == (
        2 + 3 * (len(groups) - 1),
        2 + 3 * len(set(groups) & {*"MT"}),
    )


def test_unknown_objective_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'bert'.*mapet, pim, mim"):
        get_objective("bert")
