"""Classes of images: the folders of one level, or a file of labels."""

from __future__ import annotations

import codecs
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from mapet_mm.utils.errors import UserError, listed, reason_of

# Folders that divide a data set and are no classes.
SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing"}
NO_CLASSES = 0  # as a level of folders
NAMED = 8  # classes that a line names


def classes_of(
    labels: str | Path | None, names: Sequence[str], level: int | None = None
) -> tuple[dict[str, str] | None, str]:
    """The class of each image that has one, and words for it; None if there are no two classes.

    Args:
        labels: file of lines `name class`; None takes the folders.
        names: of the images, relative to their folder.
        level: of the folders that are classes, 1 for those directly in the folder; None takes
            `level_of_classes`, and `NO_CLASSES` gives none.

    Raises:
        UserError: a file of labels that does not suit, or no two classes at a level that was asked for.
    """
    if labels:
        classes = read_labels(labels, names)
        return classes, f"{named(classes)}, of {labels}"
    if level == NO_CLASSES:
        return None, "no classes, as --class-level none says"
    found = level or level_of_classes(names)
    classes = classes_at(names, found) if found else {}
    counts = Counter(classes.values())
    if sum(count > 1 for count in counts.values()) < 2:
        if level:
            raise UserError(
                f"--class-level {level}: two folders at this level would have to hold several images, but "
                f"there is {listed(sorted(counts), most=NAMED) or 'none'}: name another level, or none"
            )
        return None, "there is no folder per class (--labels FILE names classes, --class-level N a level)"
    words = f"{named(classes)}, the folders at level {found} (--class-level N|none says otherwise)"
    outside = [name for name in names if name not in classes]
    if outside:
        words += f"; {len(outside)} outside of them, such as {listed(outside, most=1)}, without a class"
    return classes, words


def level_of_classes(names: Iterable[str]) -> int | None:
    """The first level with two or more folders besides `train`, `val` and `test`; None without one.

    Examples:
        >>> level_of_classes(["train/cat/2023/1.jpg", "train/dog/2.jpg", "val/cat/3.jpg"])
        2
    """
    folders = defaultdict(set)
    for name in names:
        for level, folder in enumerate(name.split("/")[:-1], start=1):
            folders[level].add(folder)
    for level in sorted(folders):
        others = [folder for folder in folders[level] if folder.lower() not in SPLITS]
        if len(others) >= 2:
            return level
    return None


def classes_at(names: Iterable[str], level: int) -> dict[str, str]:
    """The folder at a level of each image that is in one."""
    found = {}
    for name in names:
        *folders, _ = name.split("/")
        if len(folders) >= level:
            found[name] = folders[level - 1]
    return found


def named(classes: dict[str, str]) -> str:
    """Number and names of some classes, for a line."""
    names = sorted(set(classes.values()))
    return f"{len(names)} classes ({listed(names, most=NAMED)})"


def read_labels(file: str | Path, names: Sequence[str]) -> dict[str, str]:
    """The class of each image in a file of lines `name<tab or space>class`.

    Names may be quoted, begin with `./`, have the separators of Windows, or accents in another normal form.

    Raises:
        UserError: no such text, a line without a class, two classes of one image, one class only, or images
            without a line.
    """
    said = _said_labels(file)
    by_key = {_key(name): label for name, label in said.items()}
    classes = {}
    missing = []
    for name in names:
        label = said.get(name) or by_key.get(_key(name))
        if label:
            classes[name] = label
        else:
            missing.append(name)
    if missing:
        example = next(iter(said), "nothing")
        raise UserError(
            f"{file} has no class for {len(missing)} of {len(names)} images, such as {missing[0]}; it names "
            f"`{example}`: add lines of a name, relative to the folder of images, a tab or space, and a class"
        )
    if len(set(said.values())) < 2:
        raise UserError(f"{file} names one class only: a verdict by labels takes two")
    return classes


def _said_labels(file: str | Path) -> dict[str, str]:
    """The class by name, as the lines of a file say it."""
    try:
        content = Path(file).read_bytes()
        is_wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # Excel's "Unicode text"
        text = content.decode("utf-16" if is_wide else "utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--labels {file}: {reason_of(error)}; name a text of lines `name class`, in UTF-8"
        ) from error
    found: dict[str, str] = {}
    # Not `str.splitlines`, which takes more characters for the end of a line.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for number, line in enumerate(lines, start=1):
        line = line.rstrip()
        if not line:
            continue
        name, _, label = line.rpartition("\t" if "\t" in line else " ")
        name, label = _unquoted(name), _unquoted(label.strip())
        if not name.strip() or not label:
            raise UserError(
                f"{file}, line {number}: `{line}` is not a name and a class, with a tab or a space between"
            )
        if found.setdefault(name, label) != label:
            raise UserError(f"{file}, line {number}: `{name}` is `{found[name]}` before, and `{label}` here")
    return found


def _unquoted(text: str) -> str:
    """A text without the quotes around it."""
    bare = text.strip()
    if len(bare) > 1 and bare[0] == bare[-1] == '"':
        return bare[1:-1].replace('""', '"')
    return text


def _key(name: str) -> str:
    """What different spellings of one name have in common."""
    plain = unicodedata.normalize("NFC", name.strip())
    return plain.replace("\\", "/").removeprefix("./")
