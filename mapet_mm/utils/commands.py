"""The tools behind the commands, and the command line of each."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from mapet_mm.utils.errors import UserError

# Names the stage in the environment of the tools that `mapet-mm pretrain` runs.
STAGE = "MAPET_MM_STAGE"
CLASS_LEVEL_DEFAULT = "the first level with two or more folders besides train, val and test"
GROUPS_WORDS = (
    "images that belong together, as a patient's, a clip's or a slide's: the folders at this level, or a "
    "file of lines `name group`; whole groups are held out, drawn for few labels and resampled for intervals"
)
# configs/ and tools/, in a wheel or a clone, where `mim` looks for them.
PACKAGE = Path(__file__).parents[1] / ".mim"
TOOLS = {
    "train": ("train.py", "train the model of a config: pre-training, fine-tuning or a probe"),
    "test": ("test.py", "evaluate a checkpoint"),
    "fit-codebook": ("fit_codebook.py", "images -> codebook, as a tokenizer config says"),
    "extract-tokens": ("extract_tokens.py", "images + codebook -> token store, as a tokenizer config says"),
    "store-images": (
        "store_images.py",
        "images of a token store -> squares, so that training decodes none",
    ),
    "merge-tokens": ("merge_token_stores.py", "several token stores -> one"),
    "visualize-codebook": ("visualize_codebook.py", "show what the tokens stand for, on a page"),
    "evaluate": ("evaluate_features.py", "evaluate frozen features: k-NN, probes, few labels, segmentation"),
    "embed": ("embed.py", "a folder of images -> their features and names, as files"),
    "verdict": ("verdict.py", "tell whether a pre-training helped: beside its start and random weights"),
    "choose-change": ("choose_change.py", "keep as much of a pre-training's change of its start as helps"),
    "convert": ("convert.py", "convert weights to and from timm, Hugging Face, torchvision and ONNX"),
    "digits": ("dataset_converters/digits.py", "write the digits, the small dataset of the examples"),
}


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


def tool_command(name: str, arguments: list[str], processes: str | int | None = None) -> list[str]:
    """The complete command line of a tool of `TOOLS`, for so many processes; several need torchrun."""
    tools = PACKAGE / "tools"
    tool = [str(tools / TOOLS[name][0]), *arguments]
    if processes in (None, "1", 1):
        return [sys.executable, *tool]
    launch = [str(tools / "torchrun.py"), "--standalone", f"--nproc_per_node={processes}"]
    launcher = ["--launcher", "pytorch"] if name in ("train", "test", "fit-codebook") else []
    return [sys.executable, *launch, *tool, *launcher]


def next_line(command: str) -> str:
    """A new line with the command to run next; empty where `mapet-mm pretrain` goes on by itself."""
    return "" if STAGE in os.environ else f"\nnext: {command}"


def loading_call(target: str, folder: Path) -> str:
    """The Python call that loads a folder in timm ('timm') or Hugging Face Transformers ('hf').

    Examples:
        >>> loading_call("hf", Path("my run/huggingface"))
        'transformers.AutoModel.from_pretrained("my run/huggingface")'
    """
    name = f"local-dir:{folder}" if target == "timm" else str(folder)
    quoted = json.dumps(name, ensure_ascii=False)
    if target == "timm":
        return f"timm.create_model({quoted}, pretrained=True)"
    return f"transformers.AutoModel.from_pretrained({quoted})"
