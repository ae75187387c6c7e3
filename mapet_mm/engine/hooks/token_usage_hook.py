"""Log how a training's stored tokens are used, beside its accuracy."""

from __future__ import annotations

from mmengine.dist import master_only
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch.utils.data import Dataset

from mapet_mm.datasets.pipelines import find_step, leaf_datasets
from mapet_mm.datasets.transforms.token_grid import LoadTokenGrid
from mapet_mm.registry import HOOKS
from mapet_mm.structures.image_names import label_of
from mapet_mm.utils.errors import UserError


@HOOKS.register_module()
class TokenUsageHook(Hook):
    """Log, after training, how the training images use the ids of their token store.

    `tokens/perplexity` (the number of ids that, used evenly, would be as hard to guess), `tokens/dead` (ids
    that no image has), `tokens/purity` (percent of the patches that are in images of their token's main
    class; only where each training image has one label).

    Raises:
        UserError: before training, there are no stored tokens.
    """

    def before_train(self, runner: Runner) -> None:
        """Refuse a training without tokens before its time is spent."""
        tokens_of(runner)

    @master_only
    def after_train(self, runner: Runner) -> None:
        """Count, and write to the runner's scalars."""
        from mapet_mm.visualization.token_statistics import measure_usage

        dataset, load = tokens_of(runner)
        images = (dataset.get_data_info(index) for index in range(len(dataset)))
        labels = {load.name_of(image["img_path"]): label_of(image) for image in images}
        labelled = None not in labels.values()
        usage = measure_usage(load.store, labels if labelled else dict.fromkeys(labels, 0))
        dead = float(len(usage.counts) - usage.used)
        scalars = {"tokens/perplexity": usage.perplexity, "tokens/dead": dead}
        if labelled:
            scalars["tokens/purity"] = 100 * usage.mean_purity
        runner.visualizer.add_scalars(scalars, step=runner.epoch)
        runner.logger.info("  ".join(f"{name}: {value:.2f}" for name, value in scalars.items()))


def tokens_of(runner: Runner) -> tuple[Dataset, LoadTokenGrid]:
    """The first dataset of a training, and the step that loads its tokens."""
    dataset = next(leaf_datasets(runner.train_dataloader.dataset))
    load = find_step(dataset.pipeline, LoadTokenGrid)
    if load is None:
        raise UserError("TokenUsageHook: the training pipeline has no LoadTokenGrid")
    return dataset, load
