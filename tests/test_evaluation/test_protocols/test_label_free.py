"""Figures without labels, of features whose figures are known."""

import pytest
import torch
from clustered_features import MemoryFeatures

from mapet_mm.evaluation.protocol import Evaluated
from mapet_mm.evaluation.protocols.label_free import LabelFree


def figures(pooled, tokens, poolings, grid) -> dict[tuple[str, str], float]:
    known = dict(name="val", layers=["output"], poolings=poolings, grid=grid, labels=None)
    evaluated = Evaluated({"val": MemoryFeatures(pooled, tokens, **known)}, {}, torch.device("cpu"))
    return {(row.protocol, row.setting): row.value for row in LabelFree().rows(evaluated)}


def test_rank_and_norms_are_those_of_the_features():
    """600 images of 4 patches, over two blocks; the class tokens are 8 directions of one size."""
    tokens = torch.randn(600, 4, 8, generator=torch.Generator().manual_seed(0))
    tokens[500, 2] *= 50
    class_tokens = torch.eye(8).repeat(75, 1)
    pooled = torch.cat([class_tokens, tokens.mean(1)], 1)[None]
    found = figures(pooled, tokens, ["class token", "mean"], (2, 2))
    norms = tokens.norm(dim=-1).flatten()
    assert found["RankMe", "class token"] == pytest.approx(8, abs=1e-3)
    for name, rows in (("patch tokens", tokens.flatten(0, 1)), ("patch mean", tokens.mean(1))):
        shares = torch.linalg.svdvals(rows.double())
        shares = shares / shares.sum()
        expected = (-(shares * shares.log()).sum()).exp().item()
        assert found["RankMe", name] == pytest.approx(expected, rel=1e-4)
    assert found["patch tokens' norm", "maximum"] == pytest.approx(norms.max().item())
    assert found["patch tokens' norm", "median"] == pytest.approx(norms.quantile(0.5).item(), rel=1e-5)
    assert found["patch tokens' norm", "maximum"] > 20 * found["patch tokens' norm", "median"]


def test_features_that_are_vectors_have_a_rank_alone():
    found = figures(torch.eye(8)[None], torch.zeros(8, 0, 8), ["class token"], (0, 0))
    assert found["RankMe", "class token"] == pytest.approx(8, abs=1e-3)
    assert [name for name, _ in found] == ["RankMe", "alpha-ReQ", "uniformity"]


def test_alignment_and_uniformity_are_those_of_the_directions():
    """Two images at right angles; of one the second view turns by 90 degrees, the other's stays."""
    views = {"val": torch.tensor([[3.0, 0.0], [0.0, 5.0]]), "view": torch.tensor([[0.0, 2.0], [0.0, 1.0]])}
    known = dict(layers=["output"], poolings=["class token"], grid=(0, 0), labels=None)
    banks = {
        name: MemoryFeatures(values[None], torch.zeros(2, 0, 2), name=name, **known)
        for name, values in views.items()
    }
    rows = {row.name: row for row in LabelFree().rows(Evaluated(banks, {}, torch.device("cpu")))}
    assert rows["alignment, class token"].value == pytest.approx((2 + 0) / 2)  # |x - y|^2
    assert rows["alignment, class token"].unit == "squared distance"
    assert rows["uniformity, class token"].value == pytest.approx(-2 * 2)  # log of exp(-2 |x - y|^2)


def test_a_second_view_adds_alignment_and_lidar():
    generator = torch.Generator().manual_seed(0)
    first, other = torch.randn(2, 50, 8, generator=generator)
    banks = {}
    for name, values in (("val", first), ("view", first + 0.1 * other)):
        known = dict(name=name, layers=["output"], poolings=["class token"], grid=(0, 0), labels=None)
        banks[name] = MemoryFeatures(values[None], torch.zeros(50, 0, 8), **known)
    rows = LabelFree().rows(Evaluated(banks, {}, torch.device("cpu")))
    found = {(row.protocol, row.setting): row.value for row in rows}
    assert 0 < found["alignment", "class token"] < 0.1
    assert 4 < found["LiDAR", "class token"] < 8
    sets = dict(val=range(3), view=range(2))
    assert "another number" in LabelFree().unfit(sets, {})
