"""k-NN probe: how well nearest neighbours in feature space classify, with nothing trained."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int64
from mmengine.dist import all_gather
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.runner import EpochBasedTrainLoop, Runner
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from mapet_mm.engine.hooks.class_names_check_hook import ClassNamesError, check_order, class_names
from mapet_mm.engine.hooks.token_store_check_hook import leave_out_as_in
from mapet_mm.evaluation.image_features import (
    POOLINGS,
    all_rows,
    build_loader,
    check_sampler,
    evaluated_model,
    image_features,
    own_rows,
    rank_me,
    undisturbed,
)
from mapet_mm.registry import HOOKS

Neighbours = tuple[Float[Tensor, "query k"], Int64[Tensor, "query k"]]  # similarities and labels


def knn_predict(
    train_features: Float[Tensor, "train dim"],
    train_labels: Int64[Tensor, " train"],
    features: Float[Tensor, "query dim"],
    num_classes: int,
    k: int = 20,
    temperature: float = 0.07,
) -> Int64[Tensor, " query"]:
    """Classify by the k most similar training images, each voting with `exp(similarity / temperature)`.

    Each process compares all queries with its own share of the training images; what goes from process to
    process are each query's k nearest.

    Args:
        train_features: `(T, D)`, this process's.
        train_labels: `(T,)`, 0 .. num_classes - 1.
        features: `(Q, D)` of the images to classify, the same in all processes.
        num_classes: number of classes.
        k: neighbours that vote.
        temperature: of the votes.

    Returns:
        `(Q,)` int64, the class with most votes.

    Raises:
        ValueError: fewer training images than neighbours, or a temperature of 0 or less.
    """
    shares = all_gather(torch.tensor(len(train_features), device=features.device))
    check_neighbours(k, sum(map(int, shares)))
    check_temperature(temperature)
    queries, centre = queries_by_angle(features)
    keys = keys_by_angle(train_features, centre)
    rows, columns = tile(features.device)
    predictions = []
    for part in queries.split(rows):
        own = nearest(part, keys, train_labels, k, columns)
        similarity, voters = keep_nearest(zip(*map(all_gather, own), strict=True), k)
        predictions.append(count_votes(similarity, voters, num_classes, temperature).argmax(1))
    return torch.cat(predictions)


def unit(features: Float[Tensor, "row dim"]) -> Float[Tensor, "row dim"]:
    """Features of length 1, from any length whose square float32 may not hold; 0 stays 0."""
    largest = features.abs().amax(1, keepdim=True).clamp(min=torch.finfo(features.dtype).tiny)
    return F.normalize(features / largest, dim=1)


def queries_by_angle(
    features: Float[Tensor, "query dim"],
) -> tuple[Float[Tensor, "query dim_and_one"], Float[Tensor, " dim"]]:
    """Queries whose products with `keys_by_angle` are cosine similarities less a number of each query's own.

    Features of one direction have nearly equal similarities, of which a product in float32 holds few digits.
    Distances from a centre among them hold all: `cos(q, t) = 1 - |q - t|^2 / 2`.

    Args:
        features: of any length.

    Returns:
        The queries, and the centre, the mean of the features brought to length 1, for the keys.
    """
    queries = unit(features)
    centre = queries.mean(0)
    return F.pad(queries - centre, (0, 1), value=1), centre


def keys_by_angle(
    features: Float[Tensor, "train dim"], centre: Float[Tensor, " dim"]
) -> Float[Tensor, "train dim_and_one"]:
    """What queries are compared with (see `queries_by_angle`); features of 0 have similarity 0 with all."""
    away = unit(features) - centre
    lacking = ~features.any(1, keepdim=True)  # of the squared length 1
    return torch.cat([away, -(away.square().sum(1, keepdim=True) + lacking) / 2], dim=1)


def check_neighbours(k: int, training_images: int) -> None:
    """Raise ValueError unless there are k training images."""
    if not 1 <= k <= training_images:
        raise ValueError(f"k={k} neighbours of {training_images} training images: choose 1 to that many")


def check_temperature(temperature: float) -> None:
    """Raise ValueError unless votes can be divided by it."""
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} of k-NN's votes: choose a number above 0, as 0.07")


def count_votes(
    similarity: Float[Tensor, "query k"],
    voters: Int64[Tensor, "query k"],
    num_classes: int,
    temperature: float,
) -> Float[Tensor, "query class"]:
    """Votes for each class, by `exp(similarity / temperature)`, relative to the most similar neighbour's.

    Args:
        similarity: of each query's neighbours, less any number of its own; minus infinity has no vote.
        voters: their labels.
        num_classes: number of classes.
        temperature: of the votes.
    """
    # Relative to the largest, because exp(1 / temperature) itself is beyond float32 up to 0.011.
    relative = similarity - similarity.amax(1, keepdim=True)
    votes = torch.zeros(len(similarity), num_classes, device=similarity.device)
    return votes.scatter_add_(1, voters, (relative / temperature).exp())


def nearest(
    queries: Float[Tensor, "query dim"],
    train: Float[Tensor, "train dim"],
    labels: Int64[Tensor, " train"],
    k: int,
    columns: int,
) -> Neighbours:
    """Similarities and labels of the k most similar training images, compared `columns` at a time.

    Where there are fewer than k, neighbours of similarity minus infinity fill up: they have no vote.
    """
    best = queries.new_full((len(queries), k), float("-inf")), labels.new_zeros(len(queries), k)
    for block, names in zip(train.split(columns), labels.split(columns), strict=True):
        found, places = (queries @ block.T).topk(min(k, len(block)), dim=1)
        best = keep_nearest([best, (found, names[places])], k)
    return best


def keep_nearest(parts: Iterable[Neighbours], k: int) -> Neighbours:
    """The k most similar of each query's neighbours in all parts, or all if there are fewer."""
    similarity, voters = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    similarity, places = similarity.topk(min(k, similarity.shape[1]), dim=1)
    return similarity, voters.gather(1, places)


def tile(device: torch.device) -> tuple[int, int]:
    """Queries and training images compared at once: 64 MiB of similarities, on a GPU 1/64 of its memory."""
    if device.type != "cuda":
        return 1024, 2**14
    rows = 4096
    similarities = torch.cuda.get_device_properties(device).total_memory // 64 // 4  # float32
    return rows, max(rows, similarities // rows)


@HOOKS.register_module()
class KNNProbeHook(Hook):
    """Log the top-1 of a k-NN classifier on the backbone's features during pre-training, as `knn/top1`.

    Works with any model whose `extract_feat(images)` gives features: MaPeT, MMPretrain's BEiT, CAE and
    `ImageClassifier`, in one process or several, sharded or not. The training is not affected. Where weights
    are averaged (`EMAHook`), the average is probed, as in a validation.

    Args:
        train_dataloader: as for MMEngine's Runner; images with `gt_label` that may vote, each taken once.
        val_dataloader: images to classify.
        interval: epochs between two probes; there is always one at the end, and in a training that is counted
            in iterations no other.
        k: neighbours that vote.
        temperature: of the votes, above 0.
        pooling: 'mean' of the patch tokens, or 'class token', if features are tokens `(B, N, D)`.
        amp: take the features in autocast; by default on CUDA only. They are compared in float32.

    Raises:
        ValueError: another pooling, a temperature of 0 or less, or a loader with a sampler other than
            MMEngine's `DefaultSampler`.
    """

    priority = "LOW"

    def __init__(
        self,
        train_dataloader: Mapping[str, Any],
        val_dataloader: Mapping[str, Any],
        interval: int = 10,
        k: int = 20,
        temperature: float = 0.07,
        pooling: str = "mean",
        amp: bool | None = None,
    ) -> None:
        if pooling not in POOLINGS:
            raise ValueError(f"KNNProbeHook's pooling={pooling!r} is none of {', '.join(POOLINGS)}")
        check_temperature(temperature)
        self.loaders = (train_dataloader, val_dataloader)
        for loader in self.loaders:
            check_sampler(loader)
        self.interval, self.k, self.temperature = interval, k, temperature
        self.pooling, self.amp = pooling, amp

    def after_train_epoch(self, runner: Runner) -> None:
        """Probe every `interval` epochs and after the last."""
        if not (self.every_n_epochs(runner, self.interval) or self.is_last_train_epoch(runner)):
            return
        figures = self.figures(runner)
        if not figures:
            print_log("the images have no labels: no k-NN probe", logger="current")
            return
        by_epoch = isinstance(runner.train_loop, EpochBasedTrainLoop)
        counted, step = ("Epoch", runner.epoch + 1) if by_epoch else ("Iter", runner.iter)
        runner.visualizer.add_scalars(figures, step=step)
        listed = "  ".join(f"{name}: {value:.4f}" for name, value in figures.items())
        print_log(f"{counted}(knn) [{step}]  {listed}", logger="current")

    def figures(self, runner: Runner) -> dict[str, float]:
        """What is logged of the runner's model as it is, by its name; nothing of images without labels."""
        top1 = self.probe(runner, runner.train_dataloader.dataset)
        return {} if top1 is None else {"knn/top1": top1, "knn/rank_me": self.rank_me}

    def probe(self, runner: Runner, trained_on: Dataset | None = None) -> float | None:
        """Top-1 in percent of the runner's model as it is; None if the first images have no labels.

        Args:
            runner: its model is probed.
            trained_on: what its token stores skipped is left out here, too.
        """
        model = evaluated_model(runner)
        with undisturbed(model):
            loaders, sizes = self.build_loaders(runner, trained_on)
            if all(loader.dataset[0]["data_samples"].get("gt_label") is None for loader in loaders):
                return None
            train, val = (image_features(model, loader, self.pooling, self.amp) for loader in loaders)
            known = [own_rows(part, sizes[0]) for part in train]
            queries = [all_rows(part, sizes[1]) for part in val]
            self.rank_me = rank_me(queries[:1])
            return self.top1(*known, *queries)

    def build_loaders(self, runner: Runner, trained_on: Dataset | None) -> tuple[list[DataLoader], list[int]]:
        """Loaders of the voting images and of those to classify, and the numbers of images."""
        loaders = [build_loader(config, runner.seed) for config in self.loaders]
        sizes = [len(loader.dataset) for loader in loaders]
        for loader in loaders if trained_on is not None else ():
            leave_out_as_in(trained_on, loader.dataset)
        check_neighbours(self.k, sizes[0])  # before the set's features are taken
        try:
            check_order(*(class_names(loader.dataset) for loader in loaders), "voting", "probe's")
        except ClassNamesError as error:  # the training itself needs no classes
            print_log(f"the k-NN figures are wrong: {error}", logger="current", level=logging.WARNING)
        return loaders, sizes

    def top1(
        self,
        train_features: Float[Tensor, "train dim"],
        train_labels: Int64[Tensor, " train"],
        features: Float[Tensor, "query dim"],
        labels: Int64[Tensor, " query"],
    ) -> float:
        """Top-1 in percent; the training images are this process's, the queries those of all."""
        num_classes = 1 + max(map(int, all_gather(torch.cat([train_labels, labels]).max())))
        predicted = knn_predict(train_features, train_labels, features, num_classes, self.k, self.temperature)
        return 100 * (predicted == labels).float().mean().item()
