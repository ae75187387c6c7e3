"""k-NN probe: log during a pre-training how well nearest neighbours in feature space classify."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from mmengine.dist import all_gather, all_reduce, get_rank, get_world_size
from mmengine.hooks import EMAHook, Hook
from mmengine.logging import print_log
from mmengine.runner import EpochBasedTrainLoop, Runner
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from mapet_mm.datasets.building import build_dataset
from mapet_mm.datasets.pipelines import label_of
from mapet_mm.datasets.skipped import replace_skipped_as_in
from mapet_mm.engine.hooks.class_names_check_hook import ClassNamesError, check_class_order, class_names
from mapet_mm.engine.hooks.portable_checkpoint_hook import checkpoint_hook
from mapet_mm.evaluation.metrics.class_sizes import class_weights
from mapet_mm.evaluation.metrics.neighbours import COLUMNS, knn_votes
from mapet_mm.evaluation.metrics.rank_me import rank_me
from mapet_mm.evaluation.tables import mean_of_groups
from mapet_mm.evaluation.tokens import TokenBackbone
from mapet_mm.registry import HOOKS
from mapet_mm.utils.dist import unwrapped
from mapet_mm.utils.loader_workers import outlive_signals
from mapet_mm.utils.run_folder import BEST

TOP1 = "knn/top1"
PER_CLASS = "knn/mean_per_class"  # in its place, where classes are of unequal size
BEST_FIGURE = "best_knn"  # in MMEngine's message hub


@HOOKS.register_module()
class KNNProbeHook(Hook):
    """Log the top-1 of a k-NN classifier on the backbone's features, as `knn/top1`, and their RankMe.

    The features are patch means, or class tokens of a backbone without patches; with averaged weights
    (`EMAHook`), the average's, as in a validation. Where classes are of unequal size, each counts alike, in
    the votes and in the figure, which is `knn/mean_per_class` then.

    Works in one process or several. The training is not affected: without these images, or without their
    labels, a line in its log says so at the start. A training that writes checkpoints keeps the weights of
    its best probe beside them, as `best_knn.pth`. Its figure is the best of several on these images: measure
    these weights on others.

    Args:
        train_dataloader: as for MMEngine's Runner; images with `gt_label` that vote, each once.
        val_dataloader: images to classify.
        interval: epochs between two probes; there is always one at the end, in a training of iterations too.
        k: neighbours that vote.
        temperature: of the votes, above 0.
        most_images: of each set, evenly spaced; all by default.
    """

    priority = "LOW"

    def __init__(
        self,
        train_dataloader: Mapping[str, Any],
        val_dataloader: Mapping[str, Any],
        interval: int = 10,
        k: int = 20,
        temperature: float = 0.07,
        most_images: int | None = None,
    ) -> None:
        self.most_images = most_images
        self.loaders = (train_dataloader, val_dataloader)
        self.interval = interval
        self.k = k
        self.temperature = temperature
        self.datasets: list[Dataset] = []  # none without images or labels

    def before_train(self, runner: Runner) -> None:
        """Find the images, so that what is wrong with them shows now and not at the first probe."""
        with undisturbed(unwrapped(runner.model)):
            try:
                datasets = self.build_datasets(runner)
                samples = [dataset[0]["data_samples"] for dataset in datasets]
            except FileNotFoundError as error:  # a recipe's ImageNet, in a training on other images
                print_log(f"no k-NN during the training: {error}", logger="current", level=logging.WARNING)
                return
        if any(sample.get("gt_label") is None for sample in samples):
            print_log("the images have no labels: no k-NN during the training", logger="current")
            return
        self.datasets = datasets

    def after_train_epoch(self, runner: Runner) -> None:
        """Probe every `interval` epochs and after the last."""
        is_due = self.every_n_epochs(runner, self.interval) or self.is_last_train_epoch(runner)
        if not (is_due and self.datasets):
            return
        model = evaluated_model(runner)
        with undisturbed(model):
            figures = self.figures(TokenBackbone(model), self.build_loaders(runner))
        by_epoch = isinstance(runner.train_loop, EpochBasedTrainLoop)
        step = runner.epoch + 1 if by_epoch else runner.iter
        unit = "Epoch" if by_epoch else "Iter"
        runner.visualizer.add_scalars(figures, step=step)
        line = "  ".join(f"{name}: {value:.4f}" for name, value in figures.items())
        if by_epoch and keep_best(runner, next(iter(figures.values()))):  # one of iterations is probed once
            line += f"  (the best so far: {BEST})"
        print_log(f"{unit}(knn) [{step}]  {line}", logger="current")

    def figures(self, backbone: TokenBackbone, loaders: Sequence[DataLoader]) -> dict[str, float]:
        """The logged values by name, the k-NN first."""
        keys, labels = take_in_memory(backbone, loaders[0], everywhere=False)
        queries, query_labels = take_in_memory(backbone, loaders[1], everywhere=True)
        largest = torch.cat([labels, query_labels]).max()
        num_classes = 1 + max(int(label) for label in all_gather(largest))
        sizes = labels.bincount(minlength=num_classes)
        all_reduce(sizes)
        weights = class_weights(sizes)
        is_per_class = weights is not None
        known = zip(keys.split(COLUMNS), labels.split(COLUMNS), strict=True)
        predicted = knn_votes(queries, known, num_classes, self.k, self.temperature, weights).argmax(1)
        hits = 100 * (predicted == query_labels).double().cpu().numpy()
        averaged = query_labels.cpu().numpy() if is_per_class else np.zeros(len(hits), int)
        name = PER_CLASS if is_per_class else TOP1
        return {name: mean_of_groups(hits, averaged), "knn/rank_me": rank_me([queries])}

    def build_datasets(self, runner: Runner) -> list[Dataset]:
        """Both sets, without images that token stores skipped."""
        datasets = []
        for config in self.loaders:
            dataset = config["dataset"]
            if isinstance(dataset, Mapping):
                dataset = build_dataset(dataset)
            if self.most_images and len(dataset) > self.most_images:
                chosen = torch.linspace(0, len(dataset) - 1, self.most_images).round().long()
                dataset.get_subset_(chosen.tolist())
            replace_skipped_as_in(runner.train_dataloader.dataset, dataset)
            datasets.append(dataset)
        try:
            check_class_order(*map(class_names, datasets), "voting", "probe's")
        except ClassNamesError as error:  # the training itself needs no classes
            print_log(f"the k-NN figures are wrong: {error}", logger="current", level=logging.WARNING)
        return datasets

    def build_loaders(self, runner: Runner) -> list[DataLoader]:
        """Loaders of both sets in order; processes take turns."""
        # The first images come again until all processes have as many.
        fixed = dict(sampler=dict(type="DefaultSampler", shuffle=False, round_up=True), drop_last=False)
        fixed["collate_fn"] = dict(type="default_collate")
        loaders = []
        for config, dataset in zip(self.loaders, self.datasets, strict=True):
            loader = runner.build_dataloader({**config, **fixed, "dataset": dataset}, seed=runner.seed)
            loaders.append(outlive_signals(loader))
        return loaders


def keep_best(runner: Runner, figure: float) -> bool:
    """Write the weights beside the training's checkpoints, if it has any and no earlier probe was as good."""
    hook = checkpoint_hook(runner)
    # A resumed training knows the best of those before its checkpoint.
    best = runner.message_hub.runtime_info.get(BEST_FIGURE, -math.inf)
    if hook is None or figure <= best:
        return False
    runner.message_hub.update_info(BEST_FIGURE, figure)
    runner.save_checkpoint(
        hook.out_dir,
        BEST,
        file_client_args=hook.file_client_args,
        backend_args=hook.backend_args,
        save_optimizer=False,
        save_param_scheduler=False,
    )
    return True


def evaluated_model(runner: Runner) -> nn.Module:
    """The model that a validation measures: the average if EMAHook averages weights."""
    for hook in runner.hooks:
        if isinstance(hook, EMAHook) and getattr(hook, "evaluate_on_ema", True):  # MMPretrain's option
            return hook.ema_model.module
    return unwrapped(runner.model)


def take_in_memory(
    backbone: TokenBackbone, loader: DataLoader, everywhere: bool
) -> tuple[Float[Tensor, "image dim"], Int64[Tensor, " image"]]:
    """The last layer's patch means, or class tokens without patches, and the labels.

    Of the images of this process, or `everywhere` of those of all processes, in order.
    """
    features = None
    labels: list[int | None] = []
    for batch in loader:
        tokens = backbone(backbone.normalise(batch["inputs"]))
        pooled = tokens.pooled()  # B (poolings dim), the mean last
        pooled = pooled.chunk(len(tokens.poolings), dim=1)[-1]  # B dim
        if features is None:  # one allocation: parts and their whole would take twice the memory
            features = pooled.new_empty(loader.sampler.num_samples, pooled.shape[1])
        features[len(labels) : len(labels) + len(pooled)] = pooled
        labels += [label_of(sample) for sample in batch["data_samples"]]
    if None in labels:
        raise ValueError(f"each image of {type(loader.dataset).__name__} needs one label, `gt_label`")
    known = (features, torch.tensor(labels, device=features.device))
    num_images = len(loader.dataset)
    if everywhere:  # image i is row i // P of process i % P
        return tuple(torch.stack(all_gather(rows), dim=1).flatten(0, 1)[:num_images] for rows in known)
    # Without those that come a second time to make all processes' parts equal.
    num_own = len(range(get_rank(), num_images, get_world_size()))
    return tuple(rows[:num_own] for rows in known)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, uncompiled and without gradient; modes and random generators are then as before."""
    modes = {module: module.training for module in model.modules()}
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    devices = range(torch.cuda.device_count())
    try:
        with torch.random.fork_rng(devices), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            model.eval()
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        random.setstate(python_state)
        np.random.set_state(numpy_state)
