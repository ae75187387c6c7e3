"""The images that a tokenizer reads: any MMPretrain datasets, with a name for each image."""

from __future__ import annotations

import copy
import os
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from mapet_mm.registry import DATASETS
from mapet_mm.structures.image_names import label_of, path_of, relative_name
from mapet_mm.tokenizers.random_steps import Run, Step, first_random_step, generators_kept, watched
from mapet_mm.utils.errors import UserError, listed, reason_of

ON_ERROR = ("raise", "skip")
# Images that are prepared several times to find random steps, how often each, and the time after which no
# further image is: large images take long.
LOOKS, REPEATS, LOOK_SECONDS = 4, 8, 2.0
# Why an image that could be decoded has no features or tokens.
NOT_FINITE = "the network gives NaN or infinity for it"
TOO_LARGE = "the network gives it features above 65504, the largest number of float16, in which they are kept"


class UnreadableImagesError(UserError, RuntimeError):
    """Images that could not be decoded or encoded; everything else was computed and written."""

    def __init__(self, unreadable: Mapping[str, str], kept: str) -> None:
        (path, reason), *others = unreadable.items()
        listing = listed([path for path, _ in others], most=5)
        more = f" and {len(others)} more ({listing})" if others else ""
        encoding = reason in (NOT_FINITE, TOO_LARGE)
        super().__init__(
            f"image `{path}` could not be {'encoded' if encoding else 'decoded'} ({reason}){more}: "
            f"{'check it and the network' if encoding else 'repair or remove it'}, or leave such "
            f"images out with --on-error skip, and run the same command again; {kept}"
        )


def check_on_error(on_error: str) -> None:
    """Raise ValueError unless `on_error` is one of the options for images that cannot be decoded."""
    if on_error not in ON_ERROR:
        raise ValueError(f"on_error is {on_error!r}: one of {', '.join(ON_ERROR)}")


class NamedImages(Dataset):
    """The images of several datasets, concatenated and accessed by index.

    An image's name is its path relative to the data root, '/'-separated. The same image may be in several
    datasets.

    Args:
        configs: a dataset config of MMPretrain, or a list of them.
        data_root: folder that names are relative to; None: the datasets' own.

    Raises:
        UserError: one of them wraps other datasets or is not MMEngine's, or (on naming it) an image's name
            has a line break.
        ValueError: there is no data root or there are several, or (on naming it) an image is outside the
            root.
    """

    def __init__(
        self, configs: Mapping[str, Any] | Sequence[Mapping[str, Any]], data_root: str | None
    ) -> None:
        configs = [configs] if isinstance(configs, Mapping) else list(configs)
        self._datasets = [_without_wrapper(DATASETS.build(config)) for config in configs]
        self._ends = list(accumulate(map(len, self._datasets)))
        self.data_root = data_root or _common_root(self._datasets)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def path(self, index: int) -> str:
        """Path of an image; UserError if a dataset holds its images itself."""
        dataset, place = self._at(index)
        return path_of(dataset.get_data_info(place), dataset)

    def name(self, index: int) -> str:
        """Name of an image."""
        path = self.path(index)
        name = relative_name(path, self.data_root)
        if name is None:
            if os.path.isdir(path):
                raise UserError(
                    f"image `{path}` is a folder: remove the empty line from the dataset's list of images"
                )
            raise ValueError(f"image `{path}` is not under data_root `{self.data_root}`: correct `data_root`")
        if "\n" in name:  # names are stored as lines
            raise UserError(f"the name of image {path!r} contains a line break: rename it")
        return name

    def places(self, what: str) -> dict[str, int]:
        """Index of the first image with each name, sorted by name; shows a progress bar called `what`."""
        found: dict[str, int] = {}
        for index, name in self.numbered_names(what):
            found.setdefault(name, index)
        return {name: found[name] for name in sorted(found)}

    def numbered_names(self, what: str) -> Iterator[tuple[int, str]]:
        """All names with their indices; shows a progress bar if this takes more than a moment."""
        for index in tqdm(range(len(self)), desc=what, unit="image", delay=2):
            yield index, self.name(index)

    def labels(self) -> dict[str, int] | None:
        """Class index of each image by its name, or None where images have no label, or several."""
        labels = {name: label_of(self._info(index)) for name, index in self.places("labels").items()}
        return None if None in labels.values() else labels

    def class_names(self) -> list[str] | None:
        """Names of the classes by index, or None where the first dataset has none."""
        classes = self._datasets[0].metainfo.get("classes")
        return None if classes is None else list(classes)

    def __getitem__(self, index: int) -> tuple[int, Tensor | str]:
        """Index and pipeline output `inputs` (3, H, W), or the reason why the image could not be decoded.

        Raises:
            UserError: another step than the first fails, or gives no tensor `inputs`.
        """
        return self._prepare(index, self._steps(index))

    def random_step(self) -> str | None:
        """Number and name of the pipeline's first step that draws random numbers, None if there is none.

        The steps prepare the first images that can be decoded, each several times. A step is one that moves
        a generator of Python, NumPy or PyTorch, which are left as they were, or that does not give the same
        image each time, because it has a generator of its own. On four images, one that changes an image
        with probability 0.5 is missed once in 2^28 times, with 0.1 in 4 of 100. After two seconds no further
        image is begun.
        """
        start, looked_at = time.perf_counter(), 0
        for index in range(len(self)):
            if looked_at == LOOKS or (looked_at and time.perf_counter() - start > LOOK_SECONDS):
                break
            runs: list[Run] = []
            while len(runs) < REPEATS and (not runs or runs[-1].complete):
                runs.append(self._watch(index))
                if step := first_random_step(runs[0], runs[-1]):
                    return step
            looked_at += runs[-1].complete
        return None

    def _watch(self, index: int) -> Run:
        run = Run()
        steps = watched(self._steps(index), run)
        with generators_kept():
            run.complete = not steps or not isinstance(self._prepare(index, steps)[1], str)
        return run

    def _steps(self, index: int) -> list[Step]:
        return self._at(index)[0].pipeline.transforms

    def _prepare(self, index: int, steps: Sequence[Step]) -> tuple[int, Tensor | str]:
        dataset, place = self._at(index)
        dataset = copy.copy(dataset)  # its own `prepare_data` may read other pixels than the path's
        dataset.pipeline = partial(_run, steps)
        try:
            results = dataset.prepare_data(place)
        except _UndecodableError as error:
            return index, str(error)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"the pipeline fails on image `{self.path(index)}` ({reason_of(error)}): correct the "
                "pipeline in the config's `dataset`, or remove the image"
            ) from error
        inputs = results.get("inputs") if isinstance(results, Mapping) else results
        if not isinstance(inputs, Tensor):
            raise UserError(
                f"the pipeline gives image `{self.path(index)}` as {type(inputs).__name__}, not as a tensor "
                "`inputs`: end it with PackInputs, on one view of the image"
            )
        if inputs.is_floating_point() and not inputs.isfinite().all():
            return index, "NaN or infinity among its pixels"
        return index, inputs

    def _info(self, index: int) -> dict[str, Any]:
        dataset, place = self._at(index)
        return dataset.get_data_info(place)

    def _at(self, index: int) -> tuple[Dataset, int]:
        """The dataset of an image, and the image's index in it."""
        which = bisect_right(self._ends, index)
        return self._datasets[which], index - (self._ends[which - 1] if which else 0)


class _UndecodableError(Exception):
    """The step that reads an image has failed; the message is the reason."""


def _run(steps: Sequence[Step], results: Any) -> Any:
    load, *others = steps
    # Only errors while loading are blamed on the image; an error in the pipeline stops the run at once.
    try:
        results = load(results)
    except Exception as error:
        raise _UndecodableError(reason_of(error)) from error
    if results is None:
        raise _UndecodableError("the pipeline's first step returned nothing")
    for step in others:
        results = step(results)
    return results


def _without_wrapper(dataset: Dataset) -> Dataset:
    if not hasattr(dataset, "pipeline"):
        raise UserError(
            f"dataset {type(dataset).__name__} has no pipeline of its own: list the datasets that it wraps "
            "in its place, in the config's `dataset` or `codebook.dataset`"
        )
    if not (hasattr(dataset, "get_data_info") and hasattr(dataset, "prepare_data")):
        raise UserError(
            f"dataset {type(dataset).__name__} does not say where its images are: derive it from MMEngine's "
            "BaseDataset"
        )
    return dataset


def _common_root(datasets: Iterable[Dataset]) -> str:
    roots = sorted({str(getattr(dataset, "data_root", "") or "") for dataset in datasets})
    if len(roots) != 1 or not roots[0]:
        raise ValueError(
            f"the datasets have data roots {roots}: set `data_root` in the config to the one folder that "
            "image names shall be relative to"
        )
    return roots[0]
