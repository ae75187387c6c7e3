"""Check before training that the tokens, stored or made in the model, belong to the model and the images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import is_not
from typing import Any

import numpy as np
from mmengine.dist import all_gather_object, get_dist_info
from mmengine.hooks import Hook
from mmengine.logging import MMLogger, print_log
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import Dataset

from mapet_mm.datasets.transforms.token_grid import LoadTokenGrid, RandomCropTokenGrid
from mapet_mm.engine.hooks.alignment import check_alignment, check_views
from mapet_mm.engine.hooks.dataset_pipelines import (
    Case,
    cases_of,
    leaf_datasets,
    load_of,
    pipelines_to_come,
    with_pipeline,
)
from mapet_mm.engine.hooks.online_tokens import check_normalisation
from mapet_mm.engine.hooks.probed_pipeline import pipeline_transforms
from mapet_mm.models.target_generators.base import Tokenizer
from mapet_mm.models.target_generators.precomputed_tokens import PrecomputedTokens
from mapet_mm.models.utils.data_preprocessor import TokenGridDataPreprocessor
from mapet_mm.registry import HOOKS
from mapet_mm.structures import MissingTokensError, TokenStore, TokenStoreError
from mapet_mm.structures.codebook import Codebook
from mapet_mm.structures.image_names import path_of, relative_name
from mapet_mm.utils.dist import unwrapped

TOKENIZER = "tokenizer"  # in a checkpoint's `meta`: the digest that its token stores have


@HOOKS.register_module()
class TokenStoreCheckHook(Hook):
    """Stop before the first iteration if stored tokens do not fit the model or images lack tokens.

    Looks at every `LoadTokenGrid` in the pipelines of the training and validation sets, also inside dataset
    wrappers. With several processes each looks at its share of the images. Probe images show whether the
    images that arrive are those that the tokens stand for (see `check_alignment`).

    Of a tokenizer inside the model, its view of the images has to be normalised as those were that its
    codebook was fitted on, and the views of the model and the tokenizer have to show the same patches.

    The pipelines to which MMPretrain's `SwitchRecipeHook` and MMDetection's `PipelineSwitchHook` will switch
    are checked before training, too. Those that other hooks set are checked before a step is done with them.

    Images that the store skipped because they could not be decoded are left out: the next image takes the
    place of each. No length changes, so samplers, schedules and resumed trainings are not affected.

    Args:
        codebook: path of the codebook whose tokens the stores must hold; None only requires that all stores
            were made by the same one.
        alignment: send probe images through the pipelines; False for a pipeline that cannot take them.

    Raises:
        TokenStoreError: another grid than the backbone's, ids outside the head's vocabulary, another
            tokenizer, in a resumed training also than before, no token grids although the target generator
            needs them, or images that are not aligned with them.
        CodebookError: a tokenizer inside the model, whose images are normalised in another way than for its
            codebook.
        MissingTokensError: images without tokens, with their number and the first one's path.
    """

    priority = "VERY_HIGH"

    def __init__(self, codebook: str | None = None, alignment: bool = True) -> None:
        self.codebook = codebook
        self.alignment = alignment
        self.checked = False
        self.passed: set[tuple[int, str, str]] = set()  # datasets with their pipelines and token stores
        self.pipelines: list[Any] | None = None  # of the last step
        self.tokenizer: str | None = None
        self.tokenizer_before: str | None = None

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Remember whose tokens the checkpoint was trained to predict."""
        self.tokenizer_before = checkpoint.get("meta", {}).get(TOKENIZER)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Write down whose tokens the model predicts."""
        if self.tokenizer:
            checkpoint.setdefault("meta", {})[TOKENIZER] = self.tokenizer

    def before_train(self, runner: Runner) -> None:
        """Check the training set, also with pipelines to come, and the validation set if there is one."""
        cases = list(cases_of(runner.train_dataloader.dataset))
        leaves = [case.dataset for case in cases]
        if runner.val_loop is not None:
            cases += cases_of(runner.val_dataloader.dataset)
        for where, pipeline in pipelines_to_come(runner.hooks):
            cases += [Case(leaf, pipeline, where) for leaf in leaves]
        self._check(runner, cases)
        if runner.iter and None not in (self.tokenizer, self.tokenizer_before):  # resumed
            self._require_the_same_tokens()

    def _require_the_same_tokens(self) -> None:
        if self.tokenizer != self.tokenizer_before:
            raise TokenStoreError(
                f"this training began with the tokens of another tokenizer ({self.tokenizer_before[:12]}) "
                f"than its token store has now ({self.tokenizer[:12]}), and their ids mean other things: "
                "bring the old store back, or start a new training with another --work-dir"
            )

    def before_train_epoch(self, runner: Runner) -> None:
        """Have the pipelines looked at again: one may be changed in place."""
        self.pipelines = None

    def before_train_iter(self, runner: Runner, *args: object, **kwargs: object) -> None:
        """Check the training set again where a hook has changed its pipeline."""
        where = f"a hook changed the training pipeline before step {runner.iter + 1}"
        cases = list(cases_of(runner.train_dataloader.dataset, where))
        pipelines = [case.pipeline for case in cases]
        if self.pipelines is None or any(map(is_not, pipelines, self.pipelines)):
            self._check(runner, cases)
            self.pipelines = pipelines

    def before_val(self, runner: Runner) -> None:
        """Check the validation set of a run that does not train."""
        if not self.checked:
            self._check(runner, cases_of(runner.val_dataloader.dataset))

    def before_test(self, runner: Runner) -> None:
        """Check the test set."""
        self._check(runner, cases_of(runner.test_dataloader.dataset))

    def _check(self, runner: Runner, cases: Iterable[Case]) -> None:
        model = unwrapped(runner.model)
        if self.codebook is not None and self.tokenizer is None:
            self.tokenizer = Codebook.load(self.codebook).digest
        if not self.checked:
            check_normalisation(model)
        for case in cases:
            try:
                self._check_one(model, case)
            except TokenStoreError as error:
                if case.where is None:
                    raise
                raise type(error)(f"{case.where}: {error}") from None
        self.checked = True

    def _check_one(self, model: nn.Module, case: Case) -> None:
        dataset, load = case.dataset, load_of(case.pipeline)
        key = (repr(case.pipeline), str(load and load.path))
        if (id(dataset), *key) in self.passed:
            return
        if load is None:
            self._check_views(model, case)
        else:
            self._check_store(model, case, load, key)
        self.passed.add((id(dataset), *key))

    def _check_views(self, model: nn.Module, case: Case) -> None:
        _check_none_needed(model, case.dataset)
        tokenizer = getattr(model, "target_generator", None)
        if self.alignment and isinstance(tokenizer, Tokenizer):
            check_views(with_pipeline(case.dataset, case.pipeline), tokenizer.grid)

    def _check_store(self, model: nn.Module, case: Case, load: LoadTokenGrid, key: tuple[str, str]) -> None:
        dataset = case.dataset
        _check_fits(model, list(pipeline_transforms(case.pipeline)), load.store)
        whose = "that of the run's first token store"
        if self.codebook is not None:
            whose = f"TokenStoreCheckHook's codebook `{self.codebook}`"
        self.tokenizer = self.tokenizer or load.store.tokenizer
        load.store.require_tokenizer(self.tokenizer, whose)
        _check_images(dataset, load)
        if not self.passed:
            _say_unused_outputs(model, load.store)
        if self.alignment and key not in {passed[1:] for passed in self.passed}:
            check_alignment(with_pipeline(dataset, case.pipeline), load.store, _preprocessor(model))


def _preprocessor(model: nn.Module) -> TokenGridDataPreprocessor | None:
    preprocessor = getattr(model, "data_preprocessor", None)
    return preprocessor if isinstance(preprocessor, TokenGridDataPreprocessor) else None


def _check_none_needed(model: nn.Module, dataset: Dataset) -> None:
    if isinstance(getattr(model, "target_generator", None), PrecomputedTokens):
        raise TokenStoreError(
            f"the model trains on stored tokens, but the pipeline of {type(dataset).__name__} has no "
            "LoadTokenGrid: add dict(type='mapet_mm.LoadTokenGrid', store=...) before PackInputs"
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
    for option, vocab_size in _vocabularies(model):
        if store.vocab_size > vocab_size:
            raise TokenStoreError(
                f"token store `{store.path}` has {store.vocab_size} token ids, `{option}` is "
                f"{vocab_size}: set it to {store.vocab_size}"
            )


def _vocabularies(model: nn.Module) -> Iterator[tuple[str, int]]:
    """The model's options that say how many token ids there are."""
    for part in ("target_generator", "backbone", "neck", "head"):
        vocab_size = getattr(getattr(model, part, None), "vocab_size", None)
        if vocab_size is not None:
            yield f"model.{part}.vocab_size", vocab_size


def _say_unused_outputs(model: nn.Module, store: TokenStore) -> None:
    if larger := [f"`{name}` ({size})" for name, size in _vocabularies(model) if size > store.vocab_size]:
        MMLogger.get_current_instance().warning(
            f"token store `{store.path}` has {store.vocab_size} ids, fewer than {', '.join(larger)}: the "
            f"others are never a target; set {store.vocab_size} unless that is meant"
        )


def _check_images(dataset: Dataset, load: LoadTokenGrid) -> None:
    """Refuse images without tokens, and leave those out that the store skipped; the same in all processes."""
    found = all_gather_object(_without_tokens(dataset, load))
    missing = sorted(index for lacking, _ in found for index in lacking)
    skipped = sorted(index for _, lacking in found for index in lacking)
    if missing:
        raise MissingTokensError(
            f"token store `{load.path}` has no tokens for {len(missing)} of {len(dataset)} images of "
            f"{type(dataset).__name__}, the first `{_path(dataset, missing[0])}`: run "
            "tools/extract_tokens.py with the tokenizer's config"
        )
    if not skipped:
        print_log(f"token store `{load.path}` has tokens for all {len(dataset)} images", logger="current")
        return
    first = _path(dataset, skipped[0])
    _leave_out(dataset, skipped, load)
    MMLogger.get_current_instance().warning(
        f"token store `{load.path}` skipped {len(skipped)} of {len(dataset)} images of "
        f"{type(dataset).__name__}, which could not be decoded: they are left out, the image behind each "
        f"takes its place; the first is `{first}`, and all with their reasons are in "
        "TokenStore.open(...).skipped"
    )


def _without_tokens(dataset: Dataset, load: LoadTokenGrid) -> tuple[list[int], list[int]]:
    """Of this process' share of the images, those that lack tokens, and those that the store skipped."""
    rank, world_size = get_dist_info()
    written, reasons = load.store.written(), load.store.skipped
    missing, skipped = [], []
    indices = range(rank, len(dataset), world_size)
    names = [load.name_of(_path(dataset, index)) for index in indices]
    for index, name, row in zip(indices, names, load.store.rows(names).tolist(), strict=True):
        if row < 0 or not written[row]:
            (skipped if name in reasons else missing).append(index)
    return missing, skipped


def leave_out_as_in(trained_on: Dataset, dataset: Dataset) -> None:
    """Leave images out of a set without tokens that the token stores of another one skipped."""
    for load in filter(None, map(load_of, leaf_datasets(trained_on))):
        if reasons := load.store.skipped:
            root = load.data_root or load.store.data_root
            for leaf in leaf_datasets(dataset):
                names = (relative_name(_path(leaf, index), root) for index in range(len(leaf)))
                _leave_out(leaf, [index for index, name in enumerate(names) if name in reasons], load)


def _leave_out(dataset: Dataset, skipped: list[int], load: LoadTokenGrid) -> None:
    """Put the image behind each of these in its place."""
    if not skipped:
        return
    shown = np.arange(len(dataset))
    kept = np.delete(shown, skipped)
    if not kept.size:
        raise MissingTokensError(
            f"token store `{load.path}` skipped all images of {type(dataset).__name__}: correct its data, "
            "and run tools/extract_tokens.py --retry-skipped"
        )
    shown[skipped] = kept[np.searchsorted(kept, skipped) % len(kept)]
    dataset.get_subset_(shown.tolist())


def _path(dataset: Dataset, index: int) -> str:
    return path_of(dataset.get_data_info(index), dataset)
