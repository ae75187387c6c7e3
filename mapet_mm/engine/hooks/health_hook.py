"""A pre-training's health: figures beside the loss, and one warning, with a remedy, for each way to fail."""

from __future__ import annotations

import math

from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.runner import Runner

from mapet_mm.evaluation.metrics.rank_me import effective_rank
from mapet_mm.models.utils.prediction_statistics import PredictionStatistics
from mapet_mm.registry import HOOKS
from mapet_mm.utils.dist import unwrapped

# Warn of fewer effective predicted tokens than this share of the most so far, or of the targets' once a tenth
# of the steps are done: until then a model knows the commonest few tokens.
COLLAPSED, FEW_OF_TARGETS, BEGUN = 0.1, 0.02, 0.1
# Warn of targets that use fewer effective tokens than this share of the vocabulary, and at least this many.
USED, USED_AT_LEAST = 0.01, 2


@HOOKS.register_module()
class HealthHook(Hook):
    """Log figures that the loss does not show, and warn once of each failure, with a remedy.

    For heads that predict tokens (`TokenPredictionHead`), it logs the effective number of predicted and
    target tokens (the exponential of their entropy) and the effective rank (RankMe) of the images' mean
    latents. They cover the images of all processes since the last interval.

    It warns of predictions and codebooks that use few tokens. Images that are not finite do not count.

    Args:
        interval: steps between two checks.
    """

    def __init__(self, interval: int = 100) -> None:
        self.interval = interval
        self.warned: set[str] = set()
        self.most_predicted = 0.0
        self.statistics: PredictionStatistics | None = None

    def before_train(self, runner: Runner) -> None:
        """Let the head count its predictions."""
        head = getattr(unwrapped(runner.model), "head", None)
        if hasattr(head, "statistics"):
            head.statistics = self.statistics = PredictionStatistics(head.vocab_size)

    def after_train_iter(self, runner: Runner, *args: object, **kwargs: object) -> None:
        """Log and check, once per interval."""
        if not self.every_n_train_iters(runner, self.interval):
            return
        if self.statistics is not None:
            self.statistics.reduce()
            if not self.statistics.empty:
                self._check_predictions(runner, self.statistics)
            self.statistics.reset()

    def after_train(self, runner: Runner) -> None:
        """Stop counting."""
        if self.statistics is not None:
            unwrapped(runner.model).head.statistics = None

    def _check_predictions(self, runner: Runner, statistics: PredictionStatistics) -> None:
        predicted, targets = statistics.effective_tokens()
        figures = {"effective_tokens/predicted": predicted, "effective_tokens/targets": targets}
        rank = effective_rank(statistics.gram)
        if math.isfinite(rank):
            figures["latent_rank"] = rank
        runner.visualizer.add_scalars(figures, step=runner.iter + 1)
        self.most_predicted = max(self.most_predicted, predicted)
        begun = runner.iter > BEGUN * runner.max_iters
        few = begun and predicted < FEW_OF_TARGETS * targets
        if predicted < COLLAPSED * self.most_predicted or few:
            self._warn(
                "predictions",
                f"the predictions have collapsed: {predicted:.1f} tokens (the exponential of their entropy), "
                f"{self.most_predicted:.1f} before, {targets:.1f} of the targets: lower the rate",
            )
        if targets < max(USED_AT_LEAST, USED * statistics.vocab_size):
            self._warn(
                "codebook",
                f"the targets use {targets:.1f} of {statistics.vocab_size} tokens (the exponential of their "
                "entropy): the codebook has collapsed; fit it to this dataset (tools/fit_codebook.py)",
            )

    def _warn(self, what: str, text: str) -> None:
        if what not in self.warned:
            self.warned.add(what)
            MMLogger.get_current_instance().warning(text)
