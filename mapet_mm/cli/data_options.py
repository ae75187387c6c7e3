"""The options of several commands that say how images are read, and what their classes and groups are."""

import argparse
import os
from pathlib import Path
from typing import Any

from mapet_mm.utils.errors import UserError

CLASS_LEVEL_DEFAULT = "the first level with two or more folders besides train, val and test"
GROUPS_WORDS = (
    "images that belong together, as a patient's, a clip's or a slide's: the folders at this level, or a "
    "file of lines `name group`; whole groups are held out, drawn for few labels and resampled for intervals"
)


def add_class_options(parser: argparse.ArgumentParser, what: str) -> None:
    """Add `--labels`, `--class-level` and `--groups`: where classes and groups of images are said."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--labels", type=Path, metavar="FILE", help=labels_words(what))
    about = f"{class_level_words(what)} (default: {CLASS_LEVEL_DEFAULT})"
    group.add_argument("--class-level", type=class_level, metavar="N|none", help=about)
    parser.add_argument("--groups", type=groups_source, metavar="LEVEL|FILE", help=GROUPS_WORDS)


def labels_words(what: str) -> str:
    """What `--labels` means."""
    return f"classes {what}, in lines `name class`, with names relative to the folder of images"


def class_level_words(what: str) -> str:
    """What `--class-level` means."""
    return f"classes {what}: the folders at this level, 1 for those directly in the folder of images, or none"


def add_workers_option(parser: argparse.ArgumentParser) -> None:
    """Add `--workers`: how many processes load images."""
    parser.add_argument(
        "--workers",
        type=num_workers,
        metavar="N",
        help="processes that load images (default: those that a config names, else one a core, up to 8)",
    )


def add_picture_options(parser: argparse.ArgumentParser) -> None:
    """Add `--range`, `--bands` and `--page`: how images are read that are no photographs."""
    group = parser.add_argument_group(
        "images that are not photographs, for models that do not say it themselves"
    )
    group.add_argument(
        "--range",
        type=range_value,
        nargs="+",
        metavar="VALUE",
        help="LOW HIGH, the values that become 0 and 255, such a pair for each band, or percentiles of a "
        "sample of a folder's images, 1%% 99%%",
    )
    group.add_argument("--bands", type=int, nargs="+", metavar="BAND", help="bands that are taken, from 1")
    group.add_argument("--page", type=int, help="page that is taken, from 0")


def picture_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `LoadPicture` that were given; UserError for a range that is none."""
    values = args.range
    if values is not None:
        num_percentiles = sum(isinstance(value, str) for value in values)
        if len(values) % 2 or (num_percentiles and (num_percentiles, len(values)) != (2, 2)):
            raise UserError("--range takes LOW HIGH, such a pair for each band, or two percentiles")
        pairs = list(zip(values[::2], values[1::2], strict=True))
        values = pairs[0] if len(pairs) == 1 else pairs
    options = dict(range=values, bands=args.bands, page=args.page)
    return {name: value for name, value in options.items() if value is not None}


def range_value(text: str) -> float | str:
    """A value of `--range`: a number, or a percentile such as `1%`."""
    share = float(text.removesuffix("%"))
    return text if text.endswith("%") else share


def num_workers(text: str) -> int:
    """A number of processes; 0 for none beside the command's own."""
    if int(text) < 0:
        raise ValueError(text)
    return int(text)


def class_level(value: str | int) -> int:
    """A level of folders; 0, in Python, for `none`."""
    level = 0 if value == "none" else int(value)
    if level < 0 or value == "0":
        raise ValueError(value)
    return level


def groups_source(value: str | int | os.PathLike) -> str:
    """A level of folders, 1 or more, or a file."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    if not text or text == "0":
        raise ValueError(value)
    return text
