"""Figures beside the loss, by value, and one warning for each way to fail."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forked_processes import start_together

from mapet_mm.engine.hooks.health_hook import HealthHook
from mapet_mm.evaluation.metrics.rank_me import effective_rank
from mapet_mm.models import TokenPredictionHead
from mapet_mm.models.utils.prediction_statistics import PredictionStatistics


def statistics(predictions, tokens, vocab_size=8) -> PredictionStatistics:
    found = PredictionStatistics(vocab_size)
    found.add(torch.randn(*predictions.shape, 4), predictions, tokens)
    return found


def test_effective_tokens_are_the_exponential_of_the_entropy():
    found = statistics(torch.tensor([[0, 1, 2, 3]]), torch.tensor([[5, 5, 5, 5]]))
    assert found.effective_tokens() == (pytest.approx(4.0), pytest.approx(1.0))


def test_the_rank_of_latents_is_the_same_in_autocast():
    """bfloat16's rounding of the products would add directions, and a collapse would look healthy."""
    basis = torch.linalg.qr(torch.randn(48, 48))[0][:3]
    exact, rounded = PredictionStatistics(5), PredictionStatistics(5)
    for _ in range(20):
        latents = torch.randn(32, 4, 3) @ basis
        ids = torch.zeros(32, 4, dtype=torch.int64)
        exact.add(latents, ids, ids)
        with torch.autocast("cpu", torch.bfloat16):
            rounded.add(latents, ids, ids)
    assert effective_rank(exact.gram) == pytest.approx(3, abs=0.1)
    assert torch.equal(exact.gram, rounded.gram)


def test_a_head_that_is_watched_counts_what_it_predicts_and_learns_the_same():
    head = TokenPredictionHead(6, 5)
    head.init_weights()
    latents, tokens = torch.randn(3, 4, 6), torch.randint(5, (3, 4))
    alone = head.loss(latents, tokens)
    head.statistics = PredictionStatistics(5)
    watched = head.loss(latents, tokens)
    assert all(torch.equal(alone[name], watched[name]) for name in alone)
    predictions = head(latents).argmax(-1)
    assert head.statistics._counts[0].tolist() == torch.bincount(predictions.flatten(), minlength=5).tolist()
    assert head.statistics._counts[1].tolist() == torch.bincount(tokens.flatten(), minlength=5).tolist()


def test_an_image_that_is_not_finite_does_not_count():
    latents, tokens = torch.randn(3, 4, 6), torch.randint(8, (3, 4))
    predictions, found, good = torch.randint(8, (3, 4)), PredictionStatistics(8), PredictionStatistics(8)
    good.add(latents[1:], predictions[1:], tokens[1:])
    latents[0, 2, 1] = float("nan")
    found.add(latents, predictions, tokens)
    for name in ("_counts", "gram"):
        assert torch.equal(getattr(found, name), getattr(good, name))
    found.reset()
    found.add(latents[:1], predictions[:1], tokens[:1])
    assert found.empty
    assert np.isnan(effective_rank(torch.full((2, 2), float("inf"))))


def reduce_statistics(rank: int, folder: Path) -> None:
    """In one of several processes: it adds an image whose predictions are right, or wrong, by its number."""
    torch.distributed.init_process_group("gloo")
    found, tokens = PredictionStatistics(8), torch.tensor([[rank, rank]])
    found.reduce()  # nothing yet
    found.add(torch.full((1, 2, 2), float(rank + 1)), torch.zeros_like(tokens), tokens)
    found.reduce()
    used, gram = found.effective_tokens(), found.gram.tolist()
    (folder / f"{rank}.json").write_text(json.dumps([used, gram]))
    torch.distributed.destroy_process_group()


def test_figures_are_of_the_images_of_all_processes(tmp_path):
    start_together(2, reduce_statistics, tmp_path)
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert said[0] == said[1] == [[1.0, 2.0], [[5.0, 5.0], [5.0, 5.0]]]


class Watched:
    """A run whose steps the hook sees, an interval of one step at a time."""

    def __init__(self) -> None:
        self.hook, self.scalars = HealthHook(interval=1), {}
        self.runner = SimpleNamespace(
            iter=0,
            max_iters=100,
            visualizer=SimpleNamespace(add_scalars=lambda figures, step: self.scalars.update(figures)),
            model=SimpleNamespace(head=TokenPredictionHead(4, 400)),
        )
        self.hook.before_train(self.runner)

    def step(self, predictions, tokens) -> None:
        predictions, tokens = torch.tensor([predictions]), torch.tensor([tokens])
        self.hook.statistics.add(torch.randn(1, predictions.shape[1], 4), predictions, tokens)
        self.hook.after_train_iter(self.runner)
        self.runner.iter += 1


@pytest.fixture
def watched(capture_log) -> Watched:
    return Watched()


def test_collapsed_predictions_and_codebooks_are_warned_of_once(watched, capture_log):
    many = list(range(300))
    watched.step([0] * 300, many)  # in the beginning: the commonest token is all that it knows
    assert "collapsed" not in capture_log()
    watched.step(many, many)
    assert watched.scalars["effective_tokens/predicted"] == pytest.approx(300)
    for _ in range(2):
        watched.step([0] * 300, many)
    assert capture_log().count("the predictions have collapsed: 1.0 tokens") == 1
    for _ in range(2):
        watched.step([0, 0], [7, 7])
    assert capture_log().count("the targets use 1.0 of 400 tokens") == 1


def test_a_healthy_run_is_warned_of_nothing(watched, capture_log):
    many = list(range(300))
    for _ in range(40):
        watched.step(many, many)
    assert capture_log() == ""
