"""Counts, perplexity and class purity of a token store, against figures worked out by hand."""

import numpy as np
import pytest

from mapet_mm.tokenizers import TokenStore
from mapet_mm.utils.errors import UserError
from mapet_mm.visualization.token_statistics import TokenUsage, draw_usage, measure_usage, usage_table

NAMES = ["a.png", "b.png", "c.png"]


@pytest.fixture
def store(tmp_path):
    """Two written images of 2 x 3 tokens and one that is not written yet."""
    made = TokenStore.create(tmp_path / "tokens", NAMES, (2, 3), 10, tokenizer="made")
    made.write([0, 1], np.array([[[7, 2, 7], [0, 7, 2]], [[2, 2, 9], [7, 9, 9]]]))
    return made


def test_counts_leave_out_images_without_tokens_or_labels(store):
    assert measure_usage(store).counts.tolist() == [1, 0, 4, 0, 0, 0, 0, 4, 0, 3]
    assert measure_usage(store).used == 4
    assert measure_usage(store, {"b.png": 3}).counts.tolist() == [0, 0, 2, 0, 0, 0, 0, 1, 0, 3]


def test_chosen_tokens_are_in_use(store):
    usage = measure_usage(store)
    assert usage.most_used(3) == [2, 7, 9]
    assert usage.most_used(10) == [2, 7, 9, 0]


def test_purity_is_the_share_of_the_most_frequent_class(store):
    usage = measure_usage(store, {"a.png": 0, "b.png": 1, "c.png": 1})
    assert usage.class_counts[[0, 2, 7, 9]].tolist() == [[1, 0], [2, 2], [3, 1], [0, 3]]
    assert dict(usage_table(usage).rows)["class purity (%)"] == "75.0"  # (1 + 2 + 3 + 3) / 12


def test_random_tokens_are_as_pure_as_chance_says(tmp_path):
    names = [f"{index}.png" for index in range(2_000)]
    random = np.random.default_rng(1)
    made = TokenStore.create(tmp_path / "tokens", names, (1, 1), 500, tokenizer="made")
    made.write(range(2_000), random.integers(500, size=(2_000, 1, 1)))
    usage = measure_usage(made, {name: index % 10 for index, name in enumerate(names)})
    figures = dict(usage_table(usage).rows)
    purity = float(figures["class purity (%)"])
    assert purity == pytest.approx(float(figures["class purity by chance (%)"]), abs=2)
    assert purity > 30  # four patches a token: the most frequent class has more than its tenth


def test_empty_store_says_what_to_run(tmp_path):
    made = TokenStore.create(tmp_path / "tokens", NAMES, (2, 3), 10, tokenizer="made")
    with pytest.raises(UserError, match="extract-tokens"):
        measure_usage(made)


def test_figure_plots_every_used_token(store):
    (ranks,) = draw_usage(measure_usage(store)).axes
    assert ranks.lines[0].get_ydata().tolist() == [4, 4, 3, 1]


def test_images_without_labels_have_no_purity():
    table = usage_table(TokenUsage(np.array([3, 0, 1])))
    assert [value for _, value in table.rows] == ["3", "2 (1 dead)", "4", "1.8", "75.00"]
    assert len(table.notes) == 1
