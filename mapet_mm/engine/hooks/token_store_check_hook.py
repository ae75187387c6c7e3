"""Check before training that the tokens, stored or made in the model, belong to the model and the images."""

from __future__ import annotations

from copy import deepcopy

import torch
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import DefaultScope
from mmengine.runner import Runner
from mmpretrain.structures import DataSample
from torch import nn
from torch.utils.data import Dataset

from mapet_mm.datasets.alignment import check_alignment
from mapet_mm.datasets.pipelines import find_step, leaf_datasets, pipeline_steps
from mapet_mm.datasets.skipped import replace_skipped
from mapet_mm.datasets.transforms.token_grid import LoadTokenGrid, RandomCropTokenGrid
from mapet_mm.models.target_generators.precomputed_tokens import PrecomputedTokens
from mapet_mm.models.target_generators.tokenizer import Tokenizer
from mapet_mm.registry import HOOKS, MODELS
from mapet_mm.structures import Codebook, CodebookError, TokenStoreError
from mapet_mm.utils.dist import unwrapped
from mapet_mm.utils.precision import PRECISIONS

TOKENIZER = "tokenizer"  # in a checkpoint's `meta`: the digest that its token stores have


@HOOKS.register_module()
class TokenStoreCheckHook(Hook):
    """Stop before the first iteration if tokens do not fit the model, or images lack tokens.

    Looks at every `LoadTokenGrid` of the training and validation sets, also inside dataset wrappers, and
    sends test images through the pipelines (see `check_alignment`). A tokenizer inside the model has to see
    images normalised as its codebook's were. The next image takes the place of each that the store skipped,
    so no length changes.

    Args:
        codebook: path of the codebook whose tokens the stores must hold, in any precision of its encoder;
            None only requires that all stores were made by the same tokenizer.
        alignment: send test images through the pipelines; False for a pipeline that cannot take them.

    Raises:
        TokenStoreError: another grid than the backbone's, ids outside the head's vocabulary, another
            tokenizer, no tokens although the model needs them, a damaged file, or images not aligned.
        CodebookError: images of a tokenizer inside the model are not normalised as for its codebook.
        MissingTokensError: images without tokens, with their number and the first one's path.
    """

    priority = "VERY_HIGH"

    def __init__(self, codebook: str | None = None, alignment: bool = True) -> None:
        self.codebook = codebook
        self.alignment = alignment
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
        before = self.tokenizer_before
        now = self.tokenizer
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
        if load is not None and generator is None and not load.store.has_tokens:  # MAE's
            replace_skipped(dataset, load)
            return
        if load is not None:
            self._check_store(model, dataset, load)
            grid = load.store.grid
        elif isinstance(generator, PrecomputedTokens):
            raise TokenStoreError(
                f"the model trains on stored tokens, but the pipeline of {type(dataset).__name__} has no "
                "LoadTokenGrid: add dict(type='mapet_mm.LoadTokenGrid', store=...) before PackInputs"
            )
        else:
            grid = generator.grid if isinstance(generator, Tokenizer) else None
        if self.alignment and grid is not None:
            check_alignment(dataset, grid)

    def _check_store(self, model: nn.Module, dataset: Dataset, load: LoadTokenGrid) -> None:
        check_fits(model, dataset, load)
        if self.codebook is not None:
            codebook = Codebook.load(self.codebook)
            if load.store.tokenizer not in [codebook.digest_at(precision) for precision in PRECISIONS]:
                whose = f"TokenStoreCheckHook's codebook `{self.codebook}`"
                load.store.require_tokenizer(codebook.digest, whose)
        self.tokenizer = self.tokenizer or load.store.tokenizer
        load.store.require_tokenizer(self.tokenizer, "that of the run's first token store")
        if is_main_process():
            load.store.verify()  # against damage since it was written: a second for ImageNet's
        replace_skipped(dataset, load)


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
    # A copy, because the range of these pixels stands for no image's.
    seen = deepcopy(model.data_preprocessor)(batch, True)["inputs"][1].cpu()
    if not torch.allclose(seen, fitted_on, rtol=1e-3, atol=1e-3):
        settings = ", ".join(f"{key}={value}" for key, value in recorded.items() if key != "type")
        raise CodebookError(
            f"codebook {codebook.digest[:12]} of the model's tokenizer was fitted on images normalised with "
            f"{settings}, but {type(model.data_preprocessor).__name__} normalises the tokenizer's view in "
            "another way: set `second_mean`, `second_std` and `to_rgb` of `data_preprocessor`"
        )
