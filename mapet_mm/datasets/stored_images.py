"""The images of a token store as stored squares: a training set that decodes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from mmengine.dataset import Compose, default_collate
from mmengine.registry import DefaultScope
from mmpretrain.datasets import PackInputs
from mmpretrain.structures import DataSample
from torch.utils.data import Dataset

from mapet_mm.datasets.transforms.token_grid import LoadTokenGrid
from mapet_mm.registry import DATASETS, FUNCTIONS
from mapet_mm.structures import TokenStore, TokenStoreError
from mapet_mm.structures.names import read_lines
from mapet_mm.structures.squares import Squares
from mapet_mm.utils.splitmix import DRAW_SEED


@DATASETS.register_module()
class StoredImages(Dataset):
    """The squares and token grids of a token store, by row; written by `mapet-mm store-images`.

    An item is a dict with `img`, uint8 `(size, size, 3)`, `token_grid`, int64 `(H, W)`, `img_path`,
    `img_shape` and `sample_idx`, to which `pipeline` is applied: what the whole pipeline of a data set of
    files would have computed, pixel for pixel. Channels are in MMCV's order, BGR; other numbers of bands
    than three are in that of `LoadPicture`. There is no label, and no
    `ori_shape`. Images are in the order of the store's rows, which is that of their names; those that the
    store skipped are left out.

    Without a pipeline, a loader with `collate_fn=dict(type="mapet_mm.whole_batch")` gets whole batches:
    `inputs`, uint8 `(B, 3, size, size)`, a view of one array with channels last; `token_grids`, int64
    `(B, H, W)`; and `data_samples` with the paths. `TokenGridDataPreprocessor` takes them. Inside
    RepeatDataset or ConcatDataset the same function stacks the items, which has the same result and takes
    five times as long.

    No Python object is held per image, and what is read is not mapped; see `TensorFile`.

    Args:
        store: path of the token store.
        pipeline: what follows the square: colour jitter, masks, PackInputs. Tokens are there already.
        size: side of the squares in pixels.
        prefix: only images whose name in the store begins with this, for example "train/".
        square: configs of the steps that make the square, for `mapet-mm store-images`. Squares that were made
            by others are refused.
        data_root: folder of the names in the store, if the images have moved since they were recorded.
        left_out: file of names, one a line, of images that are left out, for example for validation.
        names: file of names, one a line, of all images of a method without tokens: `mapet-mm store-images`
            then makes the store, and leaves out what cannot be decoded. Items have no `token_grid`.

    Raises:
        TokenStoreError: there is no such store, its squares are missing or of other steps, it has no images
            with the prefix, or lacks one that is left out.

    Examples:
        >>> images = StoredImages("tokens", size=16, prefix="train/")
        >>> images[0]["img"].shape, images[0]["token_grid"].shape
        ((16, 16, 3), (4, 4))

        In a config:

        ```python
        train_dataloader = dict(
            batch_size=256,
            sampler=dict(type="DefaultSampler", shuffle=True),
            dataset=dict(
                type="mapet_mm.StoredImages",
                store="data/imagenet/tokens/kclip_rn50x64_8192",
                prefix="train/",
                square=_base_.load_square,
                pipeline=[_base_.color_jitter, _base_.pack],
            ),
        )
        ```
    """

    def __init__(
        self,
        store: str,
        pipeline: Sequence[Mapping[str, Any] | Callable] = (),
        size: int = 224,
        prefix: str = "",
        square: Sequence[Mapping[str, Any]] | None = None,
        data_root: str | None = None,
        left_out: str | None = None,
        names: str | None = None,
    ) -> None:
        self.store = TokenStore.open(store)
        self.squares = Squares(self.store, size, square)
        self.data_root = data_root or self.store.data_root or ""
        self.metainfo: dict[str, Any] = {}
        self.steps = Compose(list(pipeline))
        has_square = self.squares.has_square(prefix)
        if left_out is not None:
            has_square[self._rows_in(left_out)] = False
        if not has_square.any():
            raise TokenStoreError(f"token store `{store}` has no images whose names begin with `{prefix}`")
        # The store's row of each image: 5 MB for ImageNet, which forks share.
        self._rows = np.flatnonzero(has_square).astype(np.uint32)

    def _rows_in(self, file: str) -> Int64[np.ndarray, " names"]:
        """The store's rows of the images in a list."""
        names = read_lines(file)
        rows = self.store.rows(names)
        if (rows < 0).any():
            unknown = names[int((rows < 0).argmax())]
            raise TokenStoreError(f"token store `{self.store.path}` has no image `{unknown}` of {file}")
        return rows

    def full_init(self) -> None:
        """Nothing: the constructor opens all that is needed. MMEngine calls this of its own datasets."""

    def require_complete(self) -> None:
        """Raise TokenStoreError unless all images of the store that have tokens now have a square."""
        if not np.array_equal(self.squares.has_square(), self.store.written()):
            raise TokenStoreError(
                f"the squares in `{self.squares.folder}` are not of the images that have tokens now: run "
                "`mapet-mm store-images` with this training's config"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, indices: Sequence[int]) -> Int64[np.ndarray, " indices"]:
        """The store's row of each image."""
        indices = np.asarray(indices, np.int64)
        if indices.size and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(f"StoredImages has indices 0 to {len(self) - 1}")
        return self._rows[indices].astype(np.int64)

    def get_data_info(self, index: int) -> dict[str, Any]:
        """Path and index of an image."""
        (row,) = self.rows([index]).tolist()
        return {"img_path": self._path(row), "sample_idx": int(index)}

    def _path(self, row: int) -> str:
        return os.path.join(self.data_root, self.store.names[row])

    def __getitem__(self, index: int) -> Any:
        rows = self.rows([index])
        square = self.squares.read(rows)[0]
        results = {
            "img_path": self._path(int(rows[0])),
            "sample_idx": int(index),
            "img": square,
            "img_shape": square.shape[:2],
        }
        if self.store.has_tokens:
            results["token_grid"] = self.store.grids(rows)[0].astype(np.int64)
        return self.steps(results)

    @property
    def gives_whole_batches(self) -> bool:
        """Whether `__getitems__` returns a batch, not a list of items: there is nothing to do per image."""
        return not self.steps.transforms

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Any] | list[Any]:
        """A batch, or with a pipeline the items one by one."""
        if not self.gives_whole_batches:
            return [self[index] for index in indices]
        rows = self.rows(indices)
        images = torch.from_numpy(self.squares.read(rows))  # B H W 3
        samples = []
        for index, row in zip(indices, rows.tolist(), strict=True):
            samples.append(DataSample(metainfo={"img_path": self._path(row), "sample_idx": int(index)}))
        return {
            "inputs": images.permute(0, 3, 1, 2),
            "token_grids": torch.from_numpy(self.store.grids(rows).astype(np.int64)),
            "data_samples": samples,
        }

    @cached_property
    def pipeline(self) -> Compose:
        """The whole pipeline that gives the same items from files, for checks before a training."""
        load_tokens = LoadTokenGrid(str(self.store.path), self.data_root or None)
        with DefaultScope.overwrite_default_scope("mmpretrain"):
            return Compose([*self.squares.pipeline, load_tokens, *self.steps.transforms])


@FUNCTIONS.register_module()
def whole_batch(batch: dict[str, Any] | list[Any]) -> dict[str, Any]:
    """Collate function for a dataset that gives whole batches: leaves them as they are.

    A list of items, as RepeatDataset and ConcatDataset give it, is stacked.
    """
    if not isinstance(batch, list):
        return batch
    pack = PackInputs(algorithm_keys=["token_grid"], meta_keys=("img_path", "sample_idx", DRAW_SEED))
    return default_collate([item if "inputs" in item else pack(item) for item in batch])
