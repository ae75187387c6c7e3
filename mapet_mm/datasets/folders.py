"""Folders of written datasets: there whole or not at all, known by the options that made them."""

import json
import shutil
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path

from mapet_mm.utils.atomic_files import partial_path

# Raised whenever the files written for the same options change, so that old folders are noticed.
FORMAT = 1


def write_folder(
    out: Path, marker: str, options: dict, fill: Callable[[Path], None], overwrite: bool
) -> bool:
    """Make folder `out` whole or not at all: filled beside its place, then renamed into it.

    Args:
        out: the folder to make.
        marker: name of a file in it that keeps the options.
        options: what decides the content, as JSON has it; a folder with the same options is left as it is.
        fill: writes the content into the (existing, empty) folder that it is given.
        overwrite: replace a folder that was written with other options.

    Returns:
        True if the folder was written, False if it was there already.

    Raises:
        FileExistsError: `out` holds other options' data or something that is not ours.
    """
    replaces = out.exists()
    if replaces and _is_done(out, marker, options, overwrite):
        return False
    partial, old = partial_path(out), partial_path(out)
    partial.mkdir(parents=True)
    try:
        fill(partial)
        libraries = {name: version(name) for name in ("scikit-learn", "numpy", "pillow")}
        kept = {"format": FORMAT, "options": options, "libraries": libraries}
        (partial / marker).write_text(json.dumps(kept, indent=2) + "\n")
        if replaces:
            out.rename(old)
        partial.rename(out)
    except BaseException:
        if old.exists():
            old.rename(out)
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    return True


def _is_done(out: Path, marker: str, options: dict, overwrite: bool) -> bool:
    if not (out / marker).is_file():
        raise FileExistsError(
            f"{out} is there but was not written by this tool (no {marker}): remove it or take another --out"
        )
    kept = json.loads((out / marker).read_text())
    if kept["format"] == FORMAT and kept["options"] == options:
        return True
    if overwrite:
        return False
    theirs = kept["options"]
    changed = [
        f"{key} {theirs.get(key)} -> {value}" for key, value in options.items() if theirs.get(key) != value
    ]
    changed = changed or [f"format {kept['format']} -> {FORMAT}"]
    raise FileExistsError(
        f"{out} was written with other options ({', '.join(changed)}): add --overwrite to replace it"
    )


def write_list(path: Path, images: Iterable[tuple[str, int]]) -> None:
    """Write a list as MMPretrain's `CustomDataset` takes it: an image's path and its class a line."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{name} {label}\n" for name, label in images))


def require(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)
