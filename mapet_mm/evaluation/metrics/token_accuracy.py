"""Metrics of pre-training and of probes."""

from collections.abc import Sequence

from mmengine.evaluator import BaseMetric

from mapet_mm.registry import METRICS


@METRICS.register_module()
class TokenAccuracy(BaseMetric):
    """Mean token accuracy (percent) and loss (nats) of images: `token/accuracy`, `token/cross_entropy`.

    It averages `token_accuracy` and `token_loss` of the data samples that `MaPeT.predict` returns; all images
    have the same number of targets, so this is the mean over targets too. The loss has another name here,
    because MMEngine logs the mean of the last ten validations of whatever has `loss` in its name.

    Args:
        collect_device: 'cpu' or 'gpu', where several processes bring their results together.
        prefix: first part of the names, `token` by default.
    """

    default_prefix = "token"

    def process(self, data_batch: object, data_samples: Sequence[dict]) -> None:
        """Keep accuracy and loss of each image of a batch."""
        for sample in data_samples:
            self.results.append((float(sample["token_accuracy"]), float(sample["token_loss"])))

    def compute_metrics(self, results: list[tuple[float, float]]) -> dict[str, float]:
        """Average over all images."""
        accuracies, losses = zip(*results, strict=True)
        return {"accuracy": sum(accuracies) / len(results), "cross_entropy": sum(losses) / len(results)}


@METRICS.register_module()
class LayerwiseAccuracy(BaseMetric):
    """Top-1 (percent) of each layer's classifier, of a probe with `LayerwiseLinearHead`.

    It gives `accuracy/layer-1`, `accuracy/layer-2`, ...; the highest of them as `accuracy/best`, and as
    `accuracy/top1` for everything that reads a classifier's accuracy; and the layer that has it as
    `accuracy/best_layer` (of equals, the first). The best layer is chosen on the same images that it is
    measured on.

    Args:
        collect_device: 'cpu' or 'gpu', where several processes bring their results together.
        prefix: first part of the names, `accuracy` by default.
    """

    default_prefix = "accuracy"

    def process(self, data_batch: object, data_samples: Sequence[dict]) -> None:
        """Keep for each image of a batch which layers are right."""
        for sample in data_samples:
            truth = int(sample["gt_label"])
            self.results.append({layer: label == truth for layer, label in sample["layer_labels"].items()})

    def compute_metrics(self, results: list[dict[int, bool]]) -> dict[str, float]:
        """Average over all images."""
        top1 = {layer: 100 * sum(each[layer] for each in results) / len(results) for layer in results[0]}
        best = max(top1, key=top1.get)
        metrics = {f"layer-{layer}": value for layer, value in top1.items()}
        return {**metrics, "best": top1[best], "best_layer": best, "top1": top1[best]}
