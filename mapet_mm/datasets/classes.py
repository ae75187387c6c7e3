"""Classes of images: the folders of one level, or a file of labels."""

from __future__ import annotations

import codecs
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mapet_mm.structures.image_files import file_of
from mapet_mm.utils.errors import UserError, listed, reason_of

# Folders that divide a data set and are no classes.
TRAIN = ("train", "training")
VAL = ("val", "valid", "validation")
TEST = ("test", "testing")
SPLITS = {*TRAIN, *VAL, *TEST}
NO_CLASSES = 0  # as a level of folders
NAMED = 8  # classes that a line names
# So many folders, each with so few images, may be patients, clips or slides.
MANY_FOLDERS = 20
FEW_IMAGES = 100


def classes_of(
    labels: str | Path | None,
    names: Sequence[str],
    level: int | None = None,
    groups: Mapping[str, str] | None = None,
) -> tuple[dict[str, str] | None, str]:
    """The class of each image that has one, and words for it; None if there are no two classes.

    Folders that are groups are no classes: none of their images could vote for one of another group.

    Args:
        labels: file of lines `name class`; None takes the folders.
        names: of the images, relative to their folder.
        level: of the folders that are classes, 1 for those directly in the folder; None takes
            `level_of_classes`, and `NO_CLASSES` gives none.
        groups: of each image, if there are any; see `groups_of`.

    Raises:
        UserError: a file of labels that does not suit, or no two classes at a level that was asked for; or
            each of the classes that were asked for is in one group alone.
    """
    if labels:
        classes = read_labels(labels, names)
        if each_in_one_group(classes, groups):
            raise UserError(f"{labels}: no class has images of two groups: name other classes or --groups")
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
    if each_in_one_group(classes, groups):
        if level:
            raise UserError(f"--class-level {level}: no folder at it has images of two groups")
        return None, (
            f"the folders at level {found} are groups, and no classes (--labels FILE names classes, "
            "--class-level N a level)"
        )
    words = f"{named(classes)}, the folders at level {found} (--class-level N|none says otherwise)"
    outside = [name for name in names if name not in classes]
    if outside:
        words += f"; {len(outside)} outside of them, such as {listed(outside, most=1)}, without a class"
    most = max(counts.values())
    if not (level or groups) and len(counts) >= MANY_FOLDERS and most <= FEW_IMAGES:
        words += (
            f"; {len(counts)} folders of at most {most} images: if they are patients, clips or slides and no "
            f"classes, name `--groups {found}`"
        )
    return classes, words


def each_in_one_group(classes: Mapping[str, str], groups: Mapping[str, str] | None) -> bool:
    """True if no class has images of two groups."""
    if not groups:
        return False
    pairs = {(label, groups[name]) for name, label in classes.items()}
    return len(pairs) == len(set(classes.values()))


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
    classes = read_table(file, names, "class", "--labels")
    if len(set(classes.values())) < 2:
        raise UserError(f"{file} names one class only: a verdict by labels takes two")
    return classes


def read_table(file: str | Path, names: Sequence[str], noun: str, option: str) -> dict[str, str]:
    """What a file of lines `name<tab or space>value` says of each image; of a tile, by its own or its file's.

    Args:
        file: the text, in UTF-8 or as spreadsheets write it.
        names: of the images.
        noun: what the value is, for messages: "class", "group".
        option: that named the file.

    Raises:
        UserError: no such text, a line without a value, two values of one image, or images without a line.
    """
    said = _said_lines(file, noun, option)
    by_key = {_key(name): value for name, value in said.items()}
    found = {}
    missing = []
    for name in names:
        value = said.get(name) or by_key.get(_key(name)) or by_key.get(_key(file_of(name)))
        if value:
            found[name] = value
        else:
            missing.append(name)
    if missing:
        example = next(iter(said), "nothing")
        raise UserError(
            f"{file} has no {noun} for {len(missing)} of {len(names)} images, such as {missing[0]}; it names "
            f"`{example}`: add lines of a name, relative to the folder of images, a tab or space, and a "
            f"{noun}"
        )
    return found


def _said_lines(file: str | Path, noun: str, option: str) -> dict[str, str]:
    """The value by name, as the lines of a file say it."""
    try:
        content = Path(file).read_bytes()
        is_wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # Excel's "Unicode text"
        text = content.decode("utf-16" if is_wide else "utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{option} {file}: {reason_of(error)}; name a text of lines `name {noun}`, in UTF-8"
        ) from error
    found: dict[str, str] = {}
    # Not `str.splitlines`, which takes more characters for the end of a line.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for number, line in enumerate(lines, start=1):
        line = line.rstrip()
        if not line:
            continue
        name, _, value = line.rpartition("\t" if "\t" in line else " ")
        name, value = _unquoted(name), _unquoted(value.strip())
        if not name.strip() or not value:
            raise UserError(
                f"{file}, line {number}: `{line}` is not a name and a {noun}, with a tab or a space between"
            )
        if found.setdefault(name, value) != value:
            raise UserError(f"{file}, line {number}: `{name}` is `{found[name]}` before, and `{value}` here")
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
