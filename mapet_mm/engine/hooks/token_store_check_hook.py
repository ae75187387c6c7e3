"""Check before training that the tokens, stored or made in the model, belong to the model and the images."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.logging import MMLogger, print_log
from mmengine.registry import DefaultScope
from mmengine.runner import Runner
from mmpretrain.structures import DataSample
from torch import nn
from torch.utils.data import Dataset

from mapet_mm.datasets.pipelines import find_step, image_paths, leaf_datasets, path_of, pipeline_steps
from mapet_mm.datasets.transforms.token_grid import LoadTokenGrid, RandomCropTokenGrid
from mapet_mm.engine.hooks.alignment import check_alignment
from mapet_mm.models.target_generators.base import Tokenizer
from mapet_mm.models.target_generators.precomputed_tokens import PrecomputedTokens
from mapet_mm.registry import HOOKS, MODELS
from mapet_mm.structures import Codebook, CodebookError, MissingTokensError, TokenStoreError
from mapet_mm.structures.image_names import relative_name
from mapet_mm.utils.dist import unwrapped

TOKENIZER = "tokenizer"  # in a checkpoint's `meta`: the digest that its token stores have


@HOOKS.register_module()
class TokenStoreCheckHook(Hook):
    """Stop before the first iteration if tokens do not fit the model, or images lack tokens.

    Looks at every `LoadTokenGrid` of the training and validation sets, also inside dataset wrappers, and
    sends test images through the pipelines (see `check_alignment`). A tokenizer inside the model has to see
    images normalised as its codebook's were. The next image takes the place of each that the store skipped,
    so no length changes.

    Args:
        codebook: path of the codebook whose tokens the stores must hold; None only requires that all stores
            were made by the same one.
        alignment: send test images through the pipelines; False for a pipeline that cannot take them.

    Raises:
        TokenStoreError: another grid than the backbone's, ids outside the head's vocabulary, another
            tokenizer, no tokens although the model needs them, a damaged file, or images not aligned.
        CodebookError: images of a tokenizer inside the model are not normalised as for its codebook.
        MissingTokensError: images without tokens, with their number and the first one's path.
    """

    priority = "VERY_HIGH"

    def __init__(self, codebook: str | None = None, alignment: bool = True) -> None:
        self.codebook, self.alignment = codebook, alignment
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
        """Check the training set, and the validation set if there is one."""
        self._check(runner, runner.train_dataloader.dataset)
        if runner.val_loop is not None:
            self._check(runner, runner.val_dataloader.dataset)
        before, now = self.tokenizer_before, self.tokenizer
        if runner.iter and None not in (before, now) and before != now:  # resumed
            raise TokenStoreError(
                f"this training began with the tokens of another tokenizer ({before[:12]}) than its token "
                f"store has now ({now[:12]}): bring the old store back, or start anew with another --work-dir"
            )

    def before_test(self, runner: Runner) -> None:
        """Check the test set."""
        self._check(runner, runner.test_dataloader.dataset)

    def _check(self, runner: Runner, dataset: Dataset) -> None:
        model = unwrapped(runner.model)
        check_normalisation(model)
        for leaf in leaf_datasets(dataset):
            self._check_leaf(model, leaf)

    def _check_leaf(self, model: nn.Module, dataset: Dataset) -> None:
        load = find_step(getattr(dataset, "pipeline", None), LoadTokenGrid)
        generator = getattr(model, "target_generator", None)
        grid = generator.grid if isinstance(generator, Tokenizer) else None
        if load is not None:
            grid = load.store.grid
            check_fits(model, dataset, load)
            whose = "that of the run's first token store"
            if self.codebook is not None:
                self.tokenizer = Codebook.load(self.codebook).digest
                whose = f"TokenStoreCheckHook's codebook `{self.codebook}`"
            self.tokenizer = self.tokenizer or load.store.tokenizer
            load.store.require_tokenizer(self.tokenizer, whose)
            if is_main_process():
                load.store.verify()  # against damage since it was written: a second for ImageNet's
            leave_out_skipped(dataset, load)
        elif isinstance(generator, PrecomputedTokens):
            raise TokenStoreError(
                f"the model trains on stored tokens, but the pipeline of {type(dataset).__name__} has no "
                "LoadTokenGrid: add dict(type='mapet_mm.LoadTokenGrid', store=...) before PackInputs"
            )
        if self.alignment and grid is not None:
            check_alignment(dataset, grid)


def check_fits(model: nn.Module, dataset: Dataset, load: LoadTokenGrid) -> None:
    """Raise TokenStoreError if a store's grid or vocabulary is not the model's."""
    store = load.store
    crops = [step for step in pipeline_steps(dataset.pipeline) if isinstance(step, RandomCropTokenGrid)]
    grid = crops[-1].grid if crops else store.grid
    patches = getattr(getattr(model, "backbone", None), "patch_resolution", None)
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


def leave_out_skipped(dataset: Dataset, load: LoadTokenGrid) -> None:
    """Put the next image in the place of each that the store skipped; others have to have tokens."""

    def path(index: int) -> str:
        return path_of(dataset.get_data_info(index), dataset)

    rows = load.store.rows(_names(image_paths(dataset), load))
    lacking = np.flatnonzero((rows < 0) | ~load.store.written()[rows]).tolist()
    reasons = load.store.skipped if lacking else {}
    skipped = [index for index in lacking if reasons and load.name_of(path(index)) in reasons]
    if missing := sorted(set(lacking) - set(skipped)):
        raise MissingTokensError(
            f"token store `{load.path}` has no tokens for {len(missing)} of {len(dataset)} images of "
            f"{type(dataset).__name__}, the first `{path(missing[0])}`: run tools/extract_tokens.py"
        )
    if not skipped:
        print_log(f"token store `{load.path}` has tokens for all {len(dataset)} images", logger="current")
        return
    MMLogger.get_current_instance().warning(
        f"token store `{load.path}` skipped {len(skipped)} of {len(dataset)} images of "
        f"{type(dataset).__name__}, which could not be decoded: the next image takes the place of each; the "
        f"first is `{path(skipped[0])}`"
    )
    _leave_out(dataset, skipped, load)


def leave_out_as_in(trained_on: Dataset, dataset: Dataset) -> None:
    """Leave images out of a set without tokens that the token stores of another one skipped."""
    pipelines = (getattr(leaf, "pipeline", None) for leaf in leaf_datasets(trained_on))
    for load in (find_step(pipeline, LoadTokenGrid) for pipeline in pipelines):
        if load is not None and (reasons := load.store.skipped):
            for leaf in leaf_datasets(dataset):
                root = load.data_root or load.store.data_root
                names = (relative_name(path, root) for path in image_paths(leaf))
                skipped = [index for index, name in enumerate(names) if name in reasons]
                _leave_out(leaf, skipped, load)


def _names(paths: Iterable[str], load: LoadTokenGrid) -> Iterator[str]:
    """Names of images in a store; a million in half a second where the paths are plain."""
    root = os.path.join(load.data_root or load.store.data_root or "", "")
    for path in paths:
        name = path[len(root) :]
        is_plain = root and path.startswith(root) and "/." not in name and "//" not in name
        yield name if is_plain else load.name_of(path)


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
    if not getattr(dataset, "serialize_data", False):
        dataset.get_subset_(shown.tolist())
        return
    # As `get_subset_`, in runs of neighbours instead of image by image, which takes seconds for a million.
    ends = dataset.data_address
    starts = np.concatenate([[0], ends[:-1]])
    runs = np.split(shown, np.flatnonzero(np.diff(shown) != 1) + 1)
    pieces = [dataset.data_bytes[starts[run[0]] : ends[run[-1]]] for run in runs]
    dataset.data_bytes, dataset.data_address = np.concatenate(pieces), np.cumsum((ends - starts)[shown])


def check_normalisation(model: nn.Module) -> None:
    """Raise CodebookError if a tokenizer in the model sees images normalised otherwise than its codebook."""
    codebook = getattr(getattr(model, "target_generator", None), "codebook", None)
    metadata = codebook.metadata if isinstance(codebook, Codebook) else {}
    recorded = (metadata.get("preprocessing") or {}).get("data_preprocessor")
    if recorded is None:
        return
    pixels = torch.arange(0, 240, 5, dtype=torch.uint8).reshape(1, 3, 4, 4)
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        fitted_on = MODELS.build(recorded)({"inputs": pixels, "data_samples": None})["inputs"]
    batch = {"inputs": [pixels, pixels], "data_samples": [DataSample()]}
    seen = model.data_preprocessor(batch, True)["inputs"][1].cpu()
    if not torch.allclose(seen, fitted_on, rtol=1e-3, atol=1e-3):
        settings = ", ".join(f"{key}={value}" for key, value in recorded.items() if key != "type")
        raise CodebookError(
            f"codebook {codebook.digest[:12]} of the model's tokenizer was fitted on images normalised with "
            f"{settings}, but {type(model.data_preprocessor).__name__} normalises the tokenizer's view in "
            "another way: set `second_mean`, `second_std` and `to_rgb` of `data_preprocessor`"
        )
