"""A metric that keeps what each image adds to another one, for intervals."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.dist import is_main_process
from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS as ALL_METRICS

from mapet_mm.registry import METRICS
from mapet_mm.utils.atomic_files import replace_file


@METRICS.register_module()
class ByImage(BaseMetric):
    """MMPretrain's `Accuracy` or MMSegmentation's `IoUMetric`, and a file of what each image adds to it.

    The file has `(image, 2, class)`: numerators and denominators of the images in the dataset's order. Of
    `Accuracy` it is whether an image is right, and 1; of `IoUMetric` its areas of intersection and of union.

    Args:
        metric: 'Accuracy' or 'IoUMetric'.
        file: an .npy file.
        **options: of the metric.
    """

    def __init__(self, metric: str, file: str, **options: Any) -> None:
        self.metric = ALL_METRICS.build(dict(type=metric, **options))
        super().__init__(prefix=self.metric.prefix)
        self.file = Path(file)

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Let the metric keep its results of a batch."""
        self.metric.dataset_meta = self.dataset_meta
        self.metric.process(data_batch, data_samples)
        self.results += self.metric.results
        self.metric.results.clear()

    def compute_metrics(self, results: list) -> dict[str, float]:
        """Write the file, and compute the metric's figures."""
        if is_main_process():
            content = io.BytesIO()
            np.save(content, np.asarray([_sums_of(result) for result in results], np.float64))
            replace_file(self.file, content.getvalue())
        return self.metric.compute_metrics(results)


def _sums_of(result: dict | tuple) -> list:
    """Numerators and denominators of an image."""
    if isinstance(result, tuple):  # of IoUMetric
        intersection, union, *_ = result
        return [intersection.numpy(), union.numpy()]
    label = result["pred_score"].argmax() if "pred_score" in result else result["pred_label"]
    return [[float(label == result["gt_label"])], [1.0]]
