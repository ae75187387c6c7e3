"""Figures without labels, of features whose figures are known."""

import numpy as np
import pytest
import torch

from mapet_mm.evaluation.feature_pictures import similarity_curve
from mapet_mm.evaluation.label_free import (
    PatchSimilarity,
    label_free,
    prediction_entropy,
    rank_me,
    usage_entropy,
)


def test_rank_me_counts_directions_of_equal_size_and_fewer_where_they_are_not():
    assert rank_me([torch.eye(8)]) == pytest.approx(8, abs=1e-3)
    assert rank_me([torch.ones(20, 8)]) == pytest.approx(1, abs=1e-3)
    features = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        2.0
    ) ** torch.arange(8)
    singular = np.linalg.svd(features.numpy(), compute_uv=False)
    shares = singular / singular.sum()
    expected = np.exp(-(shares * np.log(shares)).sum())
    assert rank_me([features]) == pytest.approx(expected, rel=1e-4)
    assert rank_me(features.split(7)) == pytest.approx(expected, rel=1e-4)
    assert 1 < expected < 4


def test_similarity_is_the_mean_cosine_of_the_pairs_at_each_distance():
    tokens = torch.randn(3, 2, 4, 5, generator=torch.Generator().manual_seed(0))
    similarity = PatchSimilarity((2, 4))
    similarity.add(tokens[:1])
    similarity.add(tokens[1:])
    pairs, across = {}, []
    places = [(image, row, column) for image in range(3) for row in range(2) for column in range(4)]
    for image, *place in places:
        for other, *there in places:
            cosine = torch.cosine_similarity(
                tokens[image][tuple(place)], tokens[other][tuple(there)], dim=0
            ).item()
            if image == other:
                pairs.setdefault(round(np.hypot(*np.subtract(place, there))), []).append(cosine)
            else:
                across.append(cosine)
    assert similarity.by_distance.tolist() == pytest.approx(
        [np.mean(pairs[each]) for each in range(4)], abs=1e-6
    )
    assert similarity.by_distance[0] == pytest.approx(1)
    assert similarity.across_images == pytest.approx(np.mean(across), abs=1e-6)


def test_of_a_single_image_there_is_no_similarity_across_images():
    assert np.isnan(label_free(torch.randn(1, 2, 2, 3))["similarity across images"])


def test_entropies_are_in_bits():
    assert usage_entropy([5, 5, 0, 5, 5]) == pytest.approx(2)
    assert usage_entropy([0, 7, 0]) == 0
    logits = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [9.0, 9.0, -90.0, -90.0]]])
    assert prediction_entropy(logits).tolist() == [pytest.approx([2, 1])]


def test_without_other_images_there_is_no_line_across_them():
    labels = [line.get_label() for line in similarity_curve([1.0, 0.5, 0.4], np.nan).axes[0].lines]
    assert labels == ["in one image"]


def test_figures_do_not_depend_on_the_blocks_and_know_outliers():
    tokens = torch.randn(10, 3, 3, 6, generator=torch.Generator().manual_seed(0)).numpy().astype(np.float16)
    tokens[4, 1, 1] *= 50
    whole, parts = label_free(tokens, torch.eye(10)), label_free(tokens, torch.eye(10), block=3)
    assert whole == pytest.approx({name: pytest.approx(each) for name, each in parts.items()})
    assert whole["norm, maximum"] > 20 * whole["norm, median"]
    assert whole["RankMe, class token"] == pytest.approx(10, abs=0.01)
    assert "RankMe, class token" not in label_free(tokens)
