"""How a training's stored tokens are used, logged beside its accuracy."""

from __future__ import annotations

from mmengine.dist import master_only
from mmengine.hooks import Hook
from mmengine.runner import Runner

from mapet_mm.datasets.transforms import LoadTokenGrid
from mapet_mm.engine.alignment import pipeline_transforms
from mapet_mm.engine.token_check import leaf_datasets
from mapet_mm.registry import HOOKS


@HOOKS.register_module()
class TokenUsageHook(Hook):
    """Log, after training, how the training images use the ids of their token store.

    `tokens/perplexity` (the number of ids that, used evenly, would be as hard to guess), `tokens/dead` (ids
    that no image has), `tokens/purity` (percent of the patches that are in images of their token's main
    class).
    """

    @master_only
    def after_train(self, runner: Runner) -> None:
        """Count, and write to the runner's scalars."""
        from mapet_mm.visualization.token_usage import measure_usage  # needs matplotlib

        dataset = next(leaf_datasets(runner.train_dataloader.dataset))
        load = next(step for step in pipeline_transforms(dataset) if isinstance(step, LoadTokenGrid))
        images = (dataset.get_data_info(index) for index in range(len(dataset)))
        usage = measure_usage(
            load.store, {load.name_of(image["img_path"]): int(image["gt_label"]) for image in images}
        )
        scalars = {
            "tokens/perplexity": usage.perplexity,
            "tokens/dead": float(len(usage.counts) - usage.used),
            "tokens/purity": 100 * usage.mean_purity,
        }
        runner.visualizer.add_scalars(scalars, step=runner.epoch)
        runner.logger.info("  ".join(f"{name}: {value:.2f}" for name, value in scalars.items()))
