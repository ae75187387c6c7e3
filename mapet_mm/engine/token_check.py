"""Check before training that the stored tokens belong to the model and the images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from mmengine.dist import get_dist_info
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.model import is_model_wrapper
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import Dataset

from mapet_mm.datasets.transforms import LoadTokenGrid, RandomCropTokenGrid
from mapet_mm.registry import HOOKS
from mapet_mm.tokenizers.codebook import Codebook
from mapet_mm.tokenizers.precomputed import PrecomputedTokens
from mapet_mm.tokenizers.store import MissingTokensError, TokenStore, TokenStoreError

# Transforms of MMPretrain and mmcv that move pixels at random and would leave the token grid behind.
MOVES_PIXELS = {
    "AutoAugment",
    "EfficientNetRandomCrop",
    "RandAugment",
    "RandomAffine",
    "RandomCrop",
    "RandomFlip",
    "RandomResize",
    "RandomResizedCrop",
    "Rotate",
    "Shear",
    "Translate",
}


@HOOKS.register_module()
class TokenStoreCheckHook(Hook):
    """Stop before the first iteration if stored tokens do not fit the model or images lack tokens.

    Looks at every `LoadTokenGrid` in the pipelines of the training and validation sets, also inside dataset
    wrappers. With several processes each looks at its share of the images.

    Args:
        codebook: path of the codebook whose tokens the stores must hold; None only requires that all stores
            were made by the same one.

    Raises:
        TokenStoreError: another grid than the backbone's, ids past the head's vocabulary, another tokenizer,
            no token grids although the target generator needs them, or a transform that breaks the alignment.
        MissingTokensError: images without tokens, with their number and the first one's path.
    """

    priority = "VERY_HIGH"

    def __init__(self, codebook: str | None = None) -> None:
        self.codebook = codebook
        self.checked = False

    def before_train(self, runner: Runner) -> None:
        """Check the training set and, where there is one, the validation set."""
        datasets = [runner.train_dataloader.dataset]
        if runner.val_loop is not None:
            datasets.append(runner.val_dataloader.dataset)
        self._check(runner, datasets)

    def before_val(self, runner: Runner) -> None:
        """Check the validation set of a run that does not train."""
        if not self.checked:
            self._check(runner, [runner.val_dataloader.dataset])

    def before_test(self, runner: Runner) -> None:
        """Check the test set."""
        self._check(runner, [runner.test_dataloader.dataset])

    def _check(self, runner: Runner, datasets: list[Dataset]) -> None:
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        digest, whose = None, "that of the run's first token store"
        if self.codebook is not None:
            digest = Codebook.load(self.codebook).digest
            whose = f"TokenStoreCheckHook's codebook `{self.codebook}`"
        for dataset in (leaf for top in datasets for leaf in leaf_datasets(top)):
            transforms = list(pipeline_transforms(dataset))
            load = next((step for step in transforms if isinstance(step, LoadTokenGrid)), None)
            if load is None:
                _check_none_needed(model, dataset)
                continue
            _check_alignment(transforms, load.store)
            _check_fits(model, transforms, load.store)
            digest = digest or load.store.tokenizer
            load.store.require_tokenizer(digest, whose)
            _check_images(dataset, load)
        self.checked = True


def leaf_datasets(dataset: Dataset) -> Iterator[Dataset]:
    """The datasets with a pipeline inside wrappers (repeat, concatenation, subset, class balance)."""
    if hasattr(dataset, "pipeline"):
        yield dataset
    elif hasattr(dataset, "datasets"):
        for inner in dataset.datasets:
            yield from leaf_datasets(inner)
    elif hasattr(dataset, "dataset"):
        yield from leaf_datasets(dataset.dataset)


def pipeline_transforms(step: Any) -> Iterator[Any]:
    """Every transform of a dataset's pipeline in order, also those inside compositions and random choices."""
    step = getattr(step, "pipeline", step)
    inner = getattr(step, "transforms", None)
    if isinstance(step, list | tuple):
        inner = step
    elif inner is None:
        yield step
        return
    for transform in inner:
        yield from pipeline_transforms(transform)


def _check_none_needed(model: nn.Module, dataset: Dataset) -> None:
    if isinstance(getattr(model, "target_generator", None), PrecomputedTokens):
        raise TokenStoreError(
            f"the model trains on stored tokens, but the pipeline of {type(dataset).__name__} has no "
            "LoadTokenGrid: add dict(type='mapet_mm.LoadTokenGrid', store=...) before PackInputs"
        )


def _check_alignment(transforms: list[Any], store: TokenStore) -> None:
    for transform in transforms:
        name = type(transform).__name__
        if name in MOVES_PIXELS:
            raise TokenStoreError(
                f"{name} in the pipeline moves pixels but not the grid of token store `{store.path}`: use "
                "RandomFlipTokenGrid or RandomCropTokenGrid after LoadTokenGrid, or none"
            )


def _check_fits(model: nn.Module, transforms: list[Any], store: TokenStore) -> None:
    patches = getattr(getattr(model, "backbone", None), "patch_resolution", None)
    crops = [transform for transform in transforms if isinstance(transform, RandomCropTokenGrid)]
    grid = crops[-1].grid if crops else store.grid
    if patches is not None and tuple(patches) != grid:
        raise TokenStoreError(
            f"token store `{store.path}` gives grids of {grid[0]} x {grid[1]} tokens, the backbone has "
            f"{patches[0]} x {patches[1]} patches: change `backbone.img_size` or `backbone.patch_size`, or "
            "re-extract at another image size"
        )
    for part in ("target_generator", "backbone", "neck", "head"):
        vocab_size = getattr(getattr(model, part, None), "vocab_size", None)
        if vocab_size is not None and store.vocab_size > vocab_size:
            raise TokenStoreError(
                f"token store `{store.path}` has {store.vocab_size} token ids, `model.{part}.vocab_size` is "
                f"{vocab_size}: set it to {store.vocab_size}"
            )


def _check_images(dataset: Dataset, load: LoadTokenGrid) -> None:
    rank, world_size = get_dist_info()
    written = load.store.written()
    missing, first = 0, None
    for index in range(rank, len(dataset), world_size):
        path = dataset.get_data_info(index)["img_path"]
        if not _has_tokens(load, path, written):
            missing, first = missing + 1, first or path
    if missing:
        raise MissingTokensError(
            f"token store `{load.path}` has no tokens for {missing} of {len(dataset)} images of "
            f"{type(dataset).__name__}, the first `{first}`: run tools/extract_tokens.py with the "
            "tokenizer's config"
        )
    print_log(f"token store `{load.path}` has tokens for all {len(dataset)} images", logger="current")


def _has_tokens(load: LoadTokenGrid, img_path: str, written: np.ndarray) -> bool:
    try:
        row = load.store.row(load.name_of(img_path))
    except MissingTokensError:
        return False
    return row is not None and bool(written[row])
