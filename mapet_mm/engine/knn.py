"""k-NN probe: how well nearest neighbours in feature space classify, with nothing trained."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from mmengine.dist import all_gather, get_world_size
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.model import is_model_wrapper
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from mapet_mm.registry import HOOKS

POOLINGS = ("mean", "class token")
SIMILARITIES = 2**24  # kept at once: 64 MiB in float32


def knn_predict(
    train_features: Float[Tensor, "train dim"],
    train_labels: Int64[Tensor, " train"],
    features: Float[Tensor, "query dim"],
    num_classes: int,
    k: int = 20,
    temperature: float = 0.07,
) -> Int64[Tensor, " query"]:
    """Classify by the k most similar training images, each voting with `exp(similarity / temperature)`.

    Args:
        train_features: `(T, D)`.
        train_labels: `(T,)`, 0 .. num_classes - 1.
        features: `(Q, D)` of the images to classify.
        num_classes: number of classes.
        k: neighbours that vote.
        temperature: of the votes.

    Returns:
        `(Q,)` int64, the class with most votes.

    Raises:
        ValueError: fewer training images than neighbours.
    """
    if not 1 <= k <= len(train_features):
        raise ValueError(f"k={k} neighbours of {len(train_features)} training images: choose 1 to that many")
    train = F.normalize(train_features, dim=1)
    predictions = []
    for chunk in F.normalize(features, dim=1).split(max(1, SIMILARITIES // len(train))):
        similarity, neighbours = (chunk @ train.T).topk(k, dim=1)  # Q k
        votes = torch.zeros(len(chunk), num_classes, device=features.device)
        votes.scatter_add_(1, train_labels[neighbours], (similarity / temperature).exp())
        predictions.append(votes.argmax(1))
    return torch.cat(predictions)


@HOOKS.register_module()
class KNNProbeHook(Hook):
    """Log the top-1 of a k-NN classifier on the backbone's features during pre-training, as `knn/top1`.

    Works with any model whose `extract_feat(images)` gives features: MaPeT, MMPretrain's BEiT, CAE and
    `ImageClassifier`. The training goes on as if the hook were not there.

    Args:
        train_dataloader: as for MMEngine's Runner; images with `gt_label` that may vote.
        val_dataloader: images to classify.
        interval: epochs between two probes; there is always one at the end.
        k: neighbours that vote.
        temperature: of the votes.
        pooling: 'mean' of the patch tokens, or 'class token', where features are tokens `(B, N, D)`.
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
    ) -> None:
        if pooling not in POOLINGS:
            raise ValueError(f"KNNProbeHook's pooling={pooling!r} is none of {', '.join(POOLINGS)}")
        self.loaders = (train_dataloader, val_dataloader)
        self.interval, self.k, self.temperature, self.pooling = interval, k, temperature, pooling

    def after_train_epoch(self, runner: Runner) -> None:
        """Probe every `interval` epochs and after the last."""
        if not (self.every_n_epochs(runner, self.interval) or self.is_last_train_epoch(runner)):
            return
        top1 = self.probe(runner)
        epoch = runner.epoch + 1
        runner.visualizer.add_scalars({"knn/top1": top1}, step=epoch)
        print_log(f"Epoch(knn) [{epoch}]  knn/top1: {top1:.4f}", logger="current")

    def probe(self, runner: Runner) -> float:
        """Top-1 in percent of the runner's model as it is."""
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        with undisturbed(model):
            loaders = [self._build(runner, config) for config in self.loaders]
            (train, train_labels), (val, labels) = (self._features(model, loader) for loader in loaders)
        num_classes = int(max(train_labels.max(), labels.max())) + 1
        predicted = knn_predict(train, train_labels, val, num_classes, self.k, self.temperature)
        return 100 * (predicted == labels).float().mean().item()

    def _build(self, runner: Runner, config: Mapping[str, Any]) -> DataLoader:
        options = {
            "sampler": dict(type="DefaultSampler", shuffle=False, round_up=False),
            "collate_fn": dict(type="default_collate"),
            **config,
        }
        return runner.build_dataloader(options, seed=runner.seed)

    def _features(self, model: nn.Module, loader: DataLoader) -> tuple[Tensor, Tensor]:
        """Features `(I, D)` and labels `(I,)` of all images, from all processes."""
        features, labels = [], []
        for batch in loader:
            images = normalise(model.data_preprocessor, batch["inputs"])
            features.append(pool(model.extract_feat(images)[-1], self.pooling).float())
            labels += [int(sample.gt_label) for sample in batch["data_samples"]]
        device = features[0].device if features else next(model.parameters()).device
        return gather(torch.cat(features)), gather(torch.tensor(labels, device=device))


def pool(features: Tensor, pooling: str) -> Float[Tensor, "batch dim"]:
    """Image features `(B, D)`: of tokens `(B, N, D)` the patches' mean or the class token; others as is."""
    if features.ndim == 2:
        return features
    return features[:, 0] if pooling == "class token" else features[:, 1:].mean(1)


def normalise(preprocessor: nn.Module, images: Tensor) -> Float[Tensor, "batch 3 height width"]:
    """Images as the model's data preprocessor would hand them on, whatever else it wants of a batch."""
    images = images.to(preprocessor.mean.device).float()
    if getattr(preprocessor, "_channel_conversion", getattr(preprocessor, "to_rgb", False)):
        images = images.flip(1)
    return (images - preprocessor.mean) / preprocessor.std


def gather(values: Tensor) -> Tensor:
    """The rows of all processes, in the order of the processes; they may differ in number."""
    if get_world_size() == 1:
        return values
    counts = [int(count) for count in all_gather(torch.tensor([len(values)], device=values.device))]
    padded = values.new_zeros((max(counts), *values.shape[1:]))
    padded[: len(values)] = values
    return torch.cat([part[:count] for part, count in zip(all_gather(padded), counts, strict=True)])


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradient; modes and random generators are as before when it ends."""
    modes = {module: module.training for module in model.modules()}
    states = random.getstate(), np.random.get_state()
    devices: Sequence[int] = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            model.eval()
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        random.setstate(states[0])
        np.random.set_state(states[1])
