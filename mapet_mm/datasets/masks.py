"""Folders of images and of masks: which belong together, which values masks have, what these stand for."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from mmengine.registry import DATASETS
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from mapet_mm.datasets.label_files import LabelReader
from mapet_mm.datasets.labels import find_images
from mapet_mm.datasets.pictures import spread
from mapet_mm.datasets.transforms.labels import IGNORED
from mapet_mm.dependencies import import_quietly
from mapet_mm.utils.errors import UserError, listed
from mapet_mm.utils.loader_workers import default_workers, usable_workers

SEPARATORS = "._- "
SOME = 20  # images by whose names the endings of their masks are found
FEW = 100  # masks, which one process reads
MOST_CLASSES = 200  # more are grey levels of a picture
MANY = 20  # values, most of them rare: of smoothed edges?
RARE = 0.001  # of all pixels
LISTED = 30  # classes, a line each
THREE_CHANNELS = "of three equal channels"
KINDS = {"P": "with a palette", "RGB": THREE_CHANNELS, "RGBA": THREE_CHANNELS}
Endings = tuple[str, str]


@dataclass(frozen=True)
class MaskedImages:
    """Images and masks of equal names: `name + image_ending` and `name + mask_ending`, for each `name`."""

    image_ending: str
    mask_ending: str
    names: list[str]

    def without(self, left_out: Collection[str]) -> MaskedImages:
        """The images that are not among some, by the names of their files."""
        kept = [name for name in self.names if name + self.image_ending not in left_out]
        return replace(self, names=kept)

    def dataset(self, images: Path, masks: Path, **options: Any) -> dict[str, Any]:
        """The config of MMSegmentation's dataset of these images."""
        prefix = dict(img_path=str(images), seg_map_path=str(masks))
        endings = dict(img_suffix=self.image_ending, seg_map_suffix=self.mask_ending)
        return dict(type="mmseg.BaseSegDataset", data_prefix=prefix, **endings, **options)


def match_masks(images: Path, masks: Path) -> tuple[list[MaskedImages], list[str]]:
    """Find the mask of each image by its name, and lines about images and masks without the other.

    The mask has the image's name, in the same folder of the other tree, with another ending: `a.jpg` and
    `a.png`; or with an ending that most have: `a_mask.png`, or `a_leftImg8bit.png` and `a_gtFine.png`.

    Raises:
        UserError: a folder without images, or no image with a mask.
    """
    image_files, _ = find_images(images)
    mask_files, _ = find_images(masks)
    without_mask = dict.fromkeys(image_files)
    without_image = set(mask_files)
    pairs = []
    plain, others = endings_of(image_files, mask_files)
    for image_ending, mask_ending in [*plain, *others]:
        names = []
        for image in without_mask:
            name = image.removesuffix(image_ending)
            if image.endswith(image_ending) and name + mask_ending in without_image:
                names.append(name)
        is_usual = (image_ending, mask_ending) in plain or len(names) > len(image_files) / 2
        if names and is_usual:
            pairs.append(MaskedImages(image_ending, mask_ending, names))
            for name in names:
                del without_mask[name + image_ending]
                without_image.remove(name + mask_ending)
    if not pairs:
        raise UserError(
            f"no image of {images} has a mask in {masks}: a mask has the name of its image with another "
            f"ending, but there are {listed(image_files, most=2)} and {listed(mask_files, most=2)}"
        )
    words = []
    for what, left_out in (
        ("images without a mask", without_mask),
        ("masks without an image", without_image),
    ):
        if left_out:
            words.append(f"{what}, left out: {len(left_out)} ({listed(sorted(left_out), most=3)})")
    return pairs, words


def endings_of(images: Sequence[str], masks: Sequence[str]) -> tuple[list[Endings], list[Endings]]:
    """Endings of an image and its mask: those of equal names, and others, the most frequent first."""
    suffixes = [sorted({Path(name).suffix for name in names}) for names in (images, masks)]
    plain = list(product(*suffixes))
    in_folder = defaultdict(list)
    for mask in masks:
        in_folder[os.path.dirname(mask)].append(mask)
    counts: Counter[Endings] = Counter()
    for image in spread(images, SOME):
        for mask in in_folder[os.path.dirname(image)]:
            stems = [os.path.splitext(name)[0] for name in (image, mask)]
            common = len(os.path.commonprefix(stems).rstrip(SEPARATORS))  # noqa: RUF071
            endings = image[common:], mask[common:]
            if endings[0][0] in SEPARATORS and endings[1][0] in SEPARATORS:  # not `1.jpg` of `a1.jpg`
                counts[endings] += 1
    # What most images have is among the most frequent; one look for each of all would take hours.
    frequent = [endings for endings, _ in counts.most_common(SOME)]
    return plain, [endings for endings in frequent if endings not in plain]


@dataclass
class MaskValues:
    """What all masks have: of each value, in how many masks it is and on how many pixels; kinds of files."""

    num_masks: int = 0
    masks: Counter[int] = field(default_factory=Counter)
    pixels: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)

    def of_some(self, value: int) -> str:
        """'12 in 30 masks, 4.1 % of the pixels'."""
        share = 100 * self.pixels[value] / self.pixels.total()
        return f"{value} in {self.masks[value]} masks, {share:.2g} % of the pixels"


class _MaskReader(Dataset):
    """The values of each mask, on how many pixels each is, and the kind of its file."""

    def __init__(self, reader: LabelReader) -> None:
        self.reader = reader

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple[list[int], list[int], str]:
        values, counts = np.unique(self.reader.labels(index), return_counts=True)
        file = self.reader.open(self.reader.path(index))
        mode = "L" if file is None else file.mode
        return values.tolist(), counts.tolist(), KINDS.get(mode, "grey")


def read_masks(
    pairs: Sequence[MaskedImages], images: Path, masks: Path, load_image: Mapping[str, Any]
) -> MaskValues:
    """Read all masks, and their images' sizes.

    Args:
        pairs: of `match_masks`.
        images: folder of the images.
        masks: folder of the masks.
        load_image: the pipeline's step that reads an image.

    Raises:
        LabelFileError: a mask of another size than its image, in colours, with numbers above 255, as JPEG, or
            that cannot be read.
    """
    import_quietly("mmseg.datasets")  # registers the dataset and its steps
    found = MaskValues()
    for pair in pairs:
        with TemporaryDirectory() as folder:
            names = Path(folder, "names.txt")
            names.write_text("\n".join(pair.names))
            pipeline = [load_image, dict(type="mmseg.LoadAnnotations")]
            dataset = DATASETS.build(
                pair.dataset(images, masks, ann_file=str(names), pipeline=pipeline, reduce_zero_label=False)
            )
        reader = _MaskReader(LabelReader(dataset))
        loader = DataLoader(reader, batch_size=None, num_workers=_useful_workers(len(reader)))
        for values, counts, kind in tqdm(loader, "reading masks", unit="mask", delay=2):
            found.num_masks += 1
            found.kinds[kind] += 1
            found.masks.update(values)
            found.pixels.update(dict(zip(values, counts, strict=True)))
    return found


def _useful_workers(num_masks: int) -> int:
    """None for a few masks: to start them takes longer."""
    return usable_workers(default_workers(), lambda: 0) if num_masks > FEW else 0


@dataclass(frozen=True)
class MaskClasses:
    """What the values of masks stand for.

    Args:
        values: of each class, in order.
        ignored: values that are not labelled.
        steps: of a pipeline that reads the masks.
        reduces_zero: MMSegmentation's `reduce_zero_label`: 0 is ignored, 1 is the first class.
        words: lines that say so.
    """

    values: list[int]
    ignored: list[int]
    steps: list[dict[str, Any]]
    reduces_zero: bool
    words: list[str]

    @property
    def names(self) -> list[str]:
        """A name for each class: its value."""
        return [str(value) for value in self.values]


def take_values(found: MaskValues, ignore: Sequence[int] | None) -> MaskClasses:
    """Decide what the values of masks stand for.

    Args:
        found: in all masks.
        ignore: values that are not labelled; None ignores 255, unless all masks have 0 and 255 alone, which
            are then two classes.

    Raises:
        UserError: fewer than two classes, or so many values that masks are pictures.
    """
    present = sorted(found.masks)
    is_for_viewing = present == [0, IGNORED]
    ignored = [] if is_for_viewing else [IGNORED]
    if ignore is not None:
        ignored = sorted(ignore)
    values = [value for value in present if value not in ignored]
    if len(values) < 2:
        raise UserError(
            f"the masks have {listed([*map(found.of_some, present)], 8)}: that is {len(values)} class beside "
            f"what is ignored ({listed([*map(str, ignored)], 8)}); --ignore names the values that are not "
            "labelled, or none"
        )
    if len(values) > MOST_CLASSES:
        raise UserError(
            f"the masks have {len(values)} values: grey levels of a picture, or edges that were smoothed; "
            "save one number for each class, and resize masks without interpolation"
        )
    reduces_zero = 0 in ignored and values == list(range(1, len(values) + 1)) and set(ignored) <= {0, IGNORED}
    is_plain = values == list(range(len(values))) and set(ignored) <= {IGNORED}
    # 255 is ignored by MMSegmentation anyway, a mask of three channels it would not read.
    needs_map = found.kinds[THREE_CHANNELS] > 0 or not (is_plain or reduces_zero)
    steps = [dict(type="LoadAnnotations")]
    if needs_map:
        steps.append(dict(type="mapet_mm.MapLabels", values=values, ignored=ignored))
    elif reduces_zero:
        steps = [dict(type="LoadAnnotations", reduce_zero_label=True)]
    words = _words(found, values, ignored, is_for_viewing and ignore is None)
    return MaskClasses(values, ignored, steps, reduces_zero and not needs_map, words)


def _words(found: MaskValues, values: list[int], ignored: list[int], is_for_viewing: bool) -> list[str]:
    """Lines about masks: their kind, each value, and what it is taken for."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.kinds.most_common())
    lines = [f"masks: {found.num_masks} ({kinds}), values {min(found.masks)} to {max(found.masks)}"]
    for number, value in enumerate(values[:LISTED]):
        lines.append(f"  class {number}: value {found.of_some(value)}")
    if len(values) > LISTED:
        lines.append(f"  ... and {len(values) - LISTED} more")
    for value in ignored:
        if value in found.masks:
            lines.append(f"  ignored: value {found.of_some(value)}")
    if is_for_viewing:
        lines.append("  0 and 255 alone: taken for two classes (--ignore 255 would ignore the second)")
    elif 0 in values:
        lines.append("  0 is taken for a class; if it means unlabelled, --ignore 0 or 0,255 leaves it out")
    rare = [value for value in values if found.pixels[value] < RARE * found.pixels.total()]
    gaps = sorted(set(range(max(values))) - set(values) - set(ignored))
    if gaps and len(values) > MANY and len(rare) > len(values) / 2:
        lines.append(
            "  most are rare: if edges were smoothed, save masks that are resized without interpolation"
        )
    if gaps and not is_for_viewing:
        lines.append(f"  no mask has the values {listed([*map(str, gaps)], most=5)}: they are no classes")
    return lines
