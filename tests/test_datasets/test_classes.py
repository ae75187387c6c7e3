"""Classes of images: the first level of folders that has several, or a file of labels as people have it."""

import unicodedata

import pytest

from mapet_mm.datasets.classes import classes_of, level_of_classes, read_labels
from mapet_mm.utils.errors import UserError


def twice(*folders: str) -> list[str]:
    """Two images in each folder."""
    return [f"{folder}/{number}.jpg" for folder in folders for number in (1, 2)]


LEVELS = [
    (twice("cat", "dog"), 1),
    (twice("cats/2023", "cats/2024", "dogs/2023"), 1),  # not the years
    (twice("train/cat", "train/dog", "val/cat", "test/dog"), 2),
    (twice("train/cat", "valid/cat", "test/dog"), 2),
    (twice("DCIM/cat", "DCIM/dog/2023"), 2),
    (twice("train", "bus", "car"), 1),  # a class that is called train
    (twice("train/x/cat", "val/x/dog"), 3),
    (twice("2020"), None),
    (["1.jpg", "2.jpg"], None),
]


@pytest.mark.parametrize(("names", "level"), LEVELS, ids=[str(names[0]) for names, _ in LEVELS])
def test_classes_are_the_first_level_with_two_folders_besides_the_splits(names, level):
    assert level_of_classes(names) == level


def test_the_classes_and_their_level_are_said():
    names = twice("cats/2023", "cats/2024", "dogs/2023")
    classes, words = classes_of(None, names)
    assert classes == {name: name.partition("/")[0] for name in names}
    assert words.startswith("2 classes (`cats`, `dogs`), the folders at level 1")
    years, words = classes_of(None, names, 2)
    assert set(years.values()) == {"2023", "2024"}
    assert "`2023`, `2024`" in words
    assert classes_of(None, names, 0)[0] is None
    with pytest.raises(UserError, match=r"--class-level 3: .*none"):
        classes_of(None, names, 3)
    with pytest.raises(UserError, match=r"--class-level 1: .*`a`"):
        classes_of(None, twice("a/b", "a/c"), 1)


def test_images_outside_of_the_classes_have_none_and_are_counted():
    names = [*twice("cat", "dog"), "cover.jpg"]
    classes, words = classes_of(None, names)
    assert set(classes) == set(twice("cat", "dog"))
    assert "1 outside of them, such as `cover.jpg`" in words


@pytest.mark.parametrize("names", [["a.jpg", *twice("b")], twice("2020"), ["a/1.jpg", "b/1.jpg"]])
def test_there_are_no_classes_without_two_of_several_images(names):
    classes, words = classes_of(None, names)
    assert classes is None
    assert "no folder per class" in words


NAMES = [unicodedata.normalize("NFC", f"été_{index}.jpg") for index in range(4)]
LINES = "".join(f"{name}\t{'great dane' if index % 2 else 'cat'}\n" for index, name in enumerate(NAMES))
SPELLINGS = {
    "a byte order mark": LINES.encode("utf-8-sig"),
    "Excel's Unicode text": LINES.encode("utf-16"),
    "line ends of Windows": LINES.replace("\n", "\r\n").encode(),
    "accents apart": unicodedata.normalize("NFD", LINES).encode(),
    "quotes": "".join('"{}"\t"{}"\n'.format(*line.split("\t")) for line in LINES.splitlines()).encode(),
    "a dot before": LINES.replace("été", "./été").encode(),
    "spaces": LINES.replace("\t", " \t ").replace("\n", "  \n\n").encode(),
    "a heading": ("name\tclass\n" + LINES).encode(),
}


@pytest.mark.parametrize("content", SPELLINGS.values(), ids=SPELLINGS)
def test_labels_are_read_as_programs_write_them(tmp_path, content):
    (tmp_path / "labels.txt").write_bytes(content)
    expected = {name: "great dane" if index % 2 else "cat" for index, name in enumerate(NAMES)}
    assert read_labels(tmp_path / "labels.txt", NAMES) == expected


def test_names_that_begin_with_a_space_or_have_the_separators_of_windows_are_found(tmp_path):
    file = tmp_path / "labels.txt"
    file.write_text(" cats/my cat.jpg cat\nb\\1.jpg\tgreat dane\n\u3000c.jpg\tcat\nd.jpg dog\n")
    names = [" cats/my cat.jpg", "b/1.jpg", "\u3000c.jpg", " d.jpg"]
    assert list(read_labels(file, names).values()) == ["cat", "great dane", "cat", "dog"]


# `str.splitlines` would end a line at each of these.
ODD = ["\u2028.jpg", *(f"a{character}b.jpg" for character in "\x0b\x0c\x1c\x85\u2028\u2029")]


def test_names_may_hold_what_splitlines_takes_for_a_line_break(tmp_path):
    labels = {name: str(index % 2) for index, name in enumerate(ODD)}
    (tmp_path / "labels.txt").write_text("".join(f"{name}\t{label}\n" for name, label in labels.items()))
    assert read_labels(tmp_path / "labels.txt", ODD) == labels


REFUSED = [
    (b"1.jpg a\n", "no class for 1 of 2 images, such as 2.jpg; it names `1.jpg`"),
    (b"1.jpg a\n2.jpg\n", "line 2: `2.jpg` is not a name and a class, with a tab or a space"),
    (b"1.jpg,a\n2.jpg,b\n", "line 1: .*a tab or a space"),
    (b"1.jpg a\n2.jpg a\n", "one class"),
    (b"1.jpg a\n1.jpg b\n2.jpg a\n", "line 2: `1.jpg` is `a` before, and `b` here"),
    (b"caf\xe9.jpg a\n", "in UTF-8"),
]


@pytest.mark.parametrize(("content", "noun"), REFUSED)
def test_a_file_of_labels_that_says_too_little_is_refused_in_one_line(tmp_path, content, noun):
    (tmp_path / "labels.txt").write_bytes(content)
    with pytest.raises(UserError, match=noun) as error:
        read_labels(tmp_path / "labels.txt", ["1.jpg", "2.jpg"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [".", "gone.txt"])
def test_labels_that_are_no_file_are_refused(tmp_path, name):
    with pytest.raises(UserError, match="--labels"):
        read_labels(tmp_path / name, ["1.jpg"])
