"""Pipeline steps that load an image's stored token grid and keep it aligned with the image."""

from __future__ import annotations

from functools import cached_property

import mmcv
import numpy as np
from mmcv.transforms import BaseTransform
from mmengine.utils import to_2tuple

from mapet_mm.registry import TRANSFORMS
from mapet_mm.structures import MissingTokensError, TokenStore
from mapet_mm.structures.names import relative_name


@TRANSFORMS.register_module()
class LoadTokenGrid(BaseTransform):
    """Add `token_grid`, (H, W) int64: the stored tokens of the image at `img_path`.

    Pass it on with `PackInputs(algorithm_keys=["token_grid"])`. The image's name in the store is its path
    relative to `data_root`.

    Args:
        store: directory of the token store; opened when first used.
        data_root: folder of the names in the store, if the dataset has moved since they were recorded.
        optional: pass on images without `img_path`, as MMPretrain's inferencers give them, without tokens.

    Raises:
        TokenStoreError: the store is missing or damaged.
        MissingTokensError: the store has no tokens for an image, or an image has no `img_path`.

    Examples:
        >>> load_tokens = LoadTokenGrid("tokens")
        >>> load_tokens(dict(img_path="data/train/0/0000.png"))["token_grid"].shape
        (4, 4)
    """

    def __init__(self, store: str, data_root: str | None = None, optional: bool = False) -> None:
        self.path = store
        self.data_root = data_root
        self.optional = optional

    @cached_property
    def store(self) -> TokenStore:
        """The token store, opened when first used."""
        return TokenStore.open(self.path)

    def name_of(self, img_path: str) -> str:
        """Name in the store of the image at this path, or MissingTokensError."""
        root = self.data_root or self.store.data_root
        if not root:
            raise MissingTokensError(
                f"token store `{self.path}` records no data root: set LoadTokenGrid's data_root to the folder"
                f" of its names (the first is `{self.store.names[0]}`)"
            )
        name = relative_name(img_path, root)
        if name is None:
            raise MissingTokensError(
                f"image `{img_path}` is not under the data root `{root}` of token store `{self.path}`: set "
                "LoadTokenGrid's data_root if the dataset has moved"
            )
        return name

    def transform(self, results: dict) -> dict:
        """Add `token_grid` to the results of an image loaded from `img_path`."""
        if "img_path" not in results:
            if self.optional:
                return results
            raise MissingTokensError("LoadTokenGrid finds tokens by `img_path`, which is not there")
        results["token_grid"] = self.store[self.name_of(results["img_path"])].astype(np.int64)
        return results


@TRANSFORMS.register_module()
class RandomFlipTokenGrid(BaseTransform):
    """Flip image and token grid together, left to right.

    Args:
        prob: probability of a flip.

    Raises:
        KeyError: there is no token grid to flip.

    Examples:
        >>> flip = RandomFlipTokenGrid(prob=1.0)
        >>> image = np.zeros((32, 32, 3), np.uint8)
        >>> flip(dict(img=image, token_grid=np.array([[1, 2], [3, 4]])))["token_grid"].tolist()
        [[2, 1], [4, 3]]
    """

    def __init__(self, prob: float = 0.5) -> None:
        self.prob = prob

    def transform(self, results: dict) -> dict:
        """Flip `img` and `token_grid`, or neither."""
        grid = results["token_grid"]
        results["flip"] = bool(np.random.rand() < self.prob)
        results["flip_direction"] = "horizontal" if results["flip"] else None
        if results["flip"]:
            results["img"] = mmcv.imflip(results["img"], direction="horizontal")
            results["token_grid"] = np.ascontiguousarray(grid[:, ::-1])
        return results


@TRANSFORMS.register_module()
class RandomCropTokenGrid(BaseTransform):
    """Crop image and token grid to the same random window, on patch boundaries.

    Args:
        crop_size: side of the window in pixels, or (height, width).
        patch_size: side in pixels of the patch that a token describes, or (height, width).

    Raises:
        ValueError: the crop size is not a multiple of the patch size or is larger than the image, or the
            image's size is not its grid times the patch size.
        KeyError: there is no token grid to crop.

    Examples:
        >>> crop = RandomCropTokenGrid(crop_size=32, patch_size=16)
        >>> image = np.zeros((64, 64, 3), np.uint8)
        >>> cropped = crop(dict(img=image, token_grid=np.zeros((4, 4), np.int64)))
        >>> cropped["img"].shape, cropped["token_grid"].shape
        ((32, 32, 3), (2, 2))
    """

    def __init__(self, crop_size: int | tuple[int, int], patch_size: int | tuple[int, int]) -> None:
        self.crop_size = tuple(to_2tuple(crop_size))
        self.patch_size = tuple(to_2tuple(patch_size))
        if any(side % patch for side, patch in zip(self.crop_size, self.patch_size, strict=True)):
            raise ValueError(
                f"RandomCropTokenGrid's crop_size {self.crop_size} is not a multiple of patch_size "
                f"{self.patch_size}"
            )

    @property
    def grid(self) -> tuple[int, int]:
        """(H, W) tokens of a crop."""
        height, width = self.crop_size
        patch_height, patch_width = self.patch_size
        return height // patch_height, width // patch_width

    def transform(self, results: dict) -> dict:
        """Crop `img` and `token_grid` to a uniformly drawn window."""
        tokens = results["token_grid"]
        patch_height, patch_width = self.patch_size
        if results["img"].shape[:2] != (tokens.shape[0] * patch_height, tokens.shape[1] * patch_width):
            raise ValueError(
                f"RandomCropTokenGrid: image of {results['img'].shape[:2]} px and token grid {tokens.shape} "
                f"do not match at patch_size {self.patch_size}"
            )
        height, width = self.grid
        rows, columns = tokens.shape
        top = np.random.randint(rows - height + 1)
        left = np.random.randint(columns - width + 1)
        results["token_grid"] = tokens[top : top + height, left : left + width].copy()
        pixel_rows = slice(top * patch_height, (top + height) * patch_height)
        pixel_columns = slice(left * patch_width, (left + width) * patch_width)
        results["img"] = np.ascontiguousarray(results["img"][pixel_rows, pixel_columns])
        results["img_shape"] = self.crop_size
        return results
