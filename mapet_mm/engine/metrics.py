"""Metrics of pre-training."""

from collections.abc import Sequence

from mmengine.evaluator import BaseMetric

from mapet_mm.registry import METRICS


@METRICS.register_module()
class TokenAccuracy(BaseMetric):
    """Mean token accuracy (percent) and token loss (nats) over images, as `token/accuracy`, `token/loss`.

    It averages `token_accuracy` and `token_loss` of the data samples that `MaPeT.predict` returns; all images
    have the same number of targets, so this is the mean over targets too.

    Args:
        collect_device: 'cpu' or 'gpu', where several processes bring their results together.
        prefix: first part of the names, `token` by default.
    """

    default_prefix = "token"

    def process(self, data_batch: object, data_samples: Sequence[dict]) -> None:
        """Keep accuracy and loss of each image of a batch."""
        for sample in data_samples:
            if "token_accuracy" not in sample or "token_loss" not in sample:
                raise ValueError(
                    "TokenAccuracy found a data sample without `token_accuracy` and `token_loss`: "
                    "it evaluates pre-training (model type mapet_mm.MaPeT)"
                )
            self.results.append((float(sample["token_accuracy"]), float(sample["token_loss"])))

    def compute_metrics(self, results: list[tuple[float, float]]) -> dict[str, float]:
        """Average over all images."""
        accuracies, losses = zip(*results, strict=True)
        return {"accuracy": sum(accuracies) / len(results), "loss": sum(losses) / len(results)}
