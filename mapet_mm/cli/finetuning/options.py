"""The options of `mapet-mm finetune`."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from mapet_mm.cli.command_options import (
    COUNT,
    FLAG,
    PATH,
    SEED,
    WORKERS,
    Kind,
    Option,
    OptionError,
    Options,
    one_of,
    options_table,
)
from mapet_mm.cli.data_options import (
    CLASS_LEVEL,
    CLASS_LEVEL_DEFAULT,
    GROUPS,
    GROUPS_WORDS,
    class_level_words,
    labels_words,
)
from mapet_mm.utils.identity import canonical, digest_of_file


def _values(text: Any) -> tuple[int, ...]:
    """Values of masks: '255,11', or 'none'."""
    if text == "none":
        return ()
    parts = text if isinstance(text, tuple | list) else str(text).split(",")
    values = tuple(int(part) for part in parts)
    if not all(0 <= value <= 255 for value in values):
        raise ValueError(text)
    return values


VALUES = Kind(_values, "numbers of 0 to 255, such as 255,11, or none", "VALUES|none")


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(Options):
    """Everything that a fine-tuning can be told; each field says what it means."""

    run: Annotated[
        Path, Option(PATH, "folder that mapet-mm pretrain made", "", "RUN", True, recorded="always")
    ]
    out: Annotated[Path, Option(PATH, "folder for everything that is made", "", "OUT", recorded="never")]
    images: Annotated[
        Path | None,
        Option(
            PATH,
            "labelled images: their folders are classes; folders train and val in it, if there are such, are "
            "the split",
            "",
            "FOLDER",
            recorded="always",
        ),
    ] = None
    masks: Annotated[
        tuple[Path, Path] | None,
        Option(
            PATH,
            "folder of images and folder of masks, which have a class for each pixel, under the same names; "
            "folders train and val in both, if there are such, are the split",
            "",
            "IMAGES MASKS",
            num_values=2,
            recorded="always",
        ),
    ] = None
    epochs: Annotated[int, Option(COUNT, "passes over the labelled images", recorded="always")] = 50
    # What these two say is in the lists of images, of which OUT keeps the digest.
    labels: Annotated[
        Path | None, Option(PATH, labels_words("of --images"), "", "FILE", recorded="never")
    ] = None
    class_level: Annotated[
        int | None,
        Option(CLASS_LEVEL, class_level_words("of --images"), CLASS_LEVEL_DEFAULT, recorded="never"),
    ] = None
    groups: Annotated[str | None, Option(GROUPS, GROUPS_WORDS, recorded="always")] = None
    head: Annotated[
        str | None,
        Option(
            one_of("linear", "upernet"),
            "of a segmentation: UperNet on four layers, or one linear layer on the last one's patches",
            "upernet, or linear with --frozen",
            recorded="always",
        ),
    ] = None
    frozen: Annotated[
        bool, Option(FLAG, "train the head alone, on features that stay as they are", recorded="always")
    ] = False
    ignore: Annotated[
        tuple[int, ...] | None,
        Option(
            VALUES,
            "values of masks that are not labelled",
            "255, unless all masks have 0 and 255 alone",
            recorded="always",
        ),
    ] = None
    no_compare: Annotated[
        bool,
        Option(
            FLAG,
            "train from this pre-training alone, not from its start and from random weights, too",
            recorded="never",
        ),
    ] = False
    workers: Annotated[int, WORKERS] = min(4, os.cpu_count() or 1)
    processes: Annotated[int, Option(COUNT, "processes to train in, one for each GPU", recorded="always")] = 1
    seed: Annotated[int, SEED] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.images is None) == (self.masks is None):
            raise OptionError("name labels: either --images FOLDER or --masks IMAGES MASKS")
        if self.masks is not None and (self.labels or self.class_level is not None):
            raise OptionError("--labels and --class-level are about the classes of --images")
        if self.labels and self.class_level is not None:
            raise OptionError("--labels and --class-level exclude each other")
        if self.images is not None and self.ignore is not None:
            raise OptionError("--ignore is about the values of --masks")
        if self.images is not None and self.head is not None:
            raise OptionError("--head is of a segmentation, of --masks")

    @property
    def decoder(self) -> str:
        """The head of a segmentation."""
        return self.head or ("linear" if self.frozen else "upernet")

    def compared(self, starts: Iterable[str]) -> list[str]:
        """What is trained, by what it starts from: all, or the first alone."""
        return list(starts)[:1] if self.no_compare else list(starts)

    def recorded(self) -> dict[str, Any]:
        """Those that decide what is computed, with whole paths: OUT keeps them from its first start on."""
        kept = super().recorded()
        kept["run"] = self.run.resolve()
        kept["images"] = self.images and self.images.resolve()
        kept["masks"] = self.masks and [folder.resolve() for folder in self.masks]
        if self.groups and Path(self.groups).is_file():  # wherever it lies
            kept["groups"] = digest_of_file(self.groups)
        return canonical(kept)


if __name__ == "__main__":  # the table of docs/your_labels.md
    print(options_table(FinetuneOptions), end="")
