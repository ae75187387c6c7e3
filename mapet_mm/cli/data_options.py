"""The options of several commands that say how images are read, and what their classes and groups are."""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mapet_mm.cli.command_options import WORKERS, Kind, OptionError, whole_number

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
    group.add_argument(
        "--class-level", type=as_argument(CLASS_LEVEL), metavar=CLASS_LEVEL.metavar, help=about
    )
    parser.add_argument("--groups", type=as_argument(GROUPS), metavar=GROUPS.metavar, help=GROUPS_WORDS)


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
        type=as_argument(WORKERS.kind),
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
        type=as_argument(RANGE),
        nargs="+",
        metavar="VALUE",
        help="LOW HIGH, the values that become 0 and 255, such a pair for each band, or percentiles of a "
        "sample of a folder's images, 1%% 99%%",
    )
    group.add_argument(
        "--bands", type=as_argument(BAND), nargs="+", metavar="BAND", help="bands that are taken, from 1"
    )
    group.add_argument("--page", type=as_argument(PAGE), help="page that is taken, from 0")


def as_argument(kind: Kind) -> Callable[[str], Any]:
    """The `type` of an option of argparse, whose message says what the value must be."""

    def read(text: str) -> Any:
        try:
            return kind.read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {kind.words}, not {text!r}") from None

    return read


def picture_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `LoadPicture` that were given; OptionError for a range that is none."""
    options = dict(bands=args.bands, page=args.page)
    if args.range is not None:
        options["range"] = range_of(args.range)
    return {name: value for name, value in options.items() if value is not None}


def range_of(values: Sequence[Any]) -> tuple[Any, ...]:
    """A range as `mapet_mm.LoadPicture` takes it: one pair, or one for each band; OptionError if it is none.

    Args:
        values: numbers one after the other or in pairs, or two percentiles.
    """
    flat: list[Any] = []
    for value in values:
        flat += value if isinstance(value, tuple) else [value]
    num_percentiles = sum(isinstance(value, str) for value in flat)
    if len(flat) % 2 or (num_percentiles and (num_percentiles, len(flat)) != (2, 2)):
        raise OptionError("--range takes LOW HIGH, such a pair for each band, or two percentiles")
    pairs = tuple(zip(flat[::2], flat[1::2], strict=True))
    return pairs[0] if len(pairs) == 1 else pairs


def _range_value(given: Any) -> Any:
    """A number, a percentile such as `1%`, or a pair of numbers."""
    if isinstance(given, tuple | list):
        return tuple(_range_value(each) for each in given)
    if isinstance(given, str) and given.endswith("%"):
        share = float(given[:-1])
        if not 0 <= share <= 100:
            raise ValueError(given)
        return given
    value = float(given)
    return int(value) if value.is_integer() else value


def _tiles(value: Any) -> tuple[int, int]:
    """Side and overlap of tiles, of `SIDE[,OVERLAP]` or numbers."""
    if isinstance(value, str):
        value = value.split(",")
    elif isinstance(value, int):
        value = [value]
    if len(value) == 1:
        value = [*value, 0]
    side, overlap = map(int, value)
    if not 0 <= overlap < side:
        raise ValueError(value)
    return side, overlap


def _class_level(value: str | int) -> int:
    """A level of folders; 0, in Python, for `none`."""
    level = 0 if value == "none" else int(value)
    if level < 0 or value == "0":
        raise ValueError(value)
    return level


def _groups(value: str | int | os.PathLike) -> str:
    """A level of folders, 1 or more, or a file."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    if not text or text == "0":
        raise ValueError(value)
    return text


RANGE = Kind(_range_value, "numbers, or two percentiles such as 1% and 99%", "LOW HIGH")
BAND = whole_number("numbers from 1", lambda band: band >= 1)
PAGE = whole_number("0 or more", lambda page: page >= 0)
TILES = Kind(_tiles, "SIDE or SIDE,OVERLAP, in pixels, with an overlap below the side", "SIDE[,OVERLAP]")
CLASS_LEVEL = Kind(_class_level, "a level of folders, 1 or more, or none", "N|none")
GROUPS = Kind(_groups, "a level of folders, 1 or more, or a file", "LEVEL|FILE")
