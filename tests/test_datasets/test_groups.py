"""Groups of images: read from folders or a file, and drawn whole, by seed, in proportion to the classes."""

from collections import Counter

import pytest

from mapet_mm.datasets.classes import classes_of
from mapet_mm.datasets.groups import draw_share, groups_in_turn, groups_of
from mapet_mm.utils.errors import UserError

SLICES = [f"p{patient:02d}/{number:02d}.png" for patient in range(40) for number in range(25)]
PATIENT = {name: name[:3] for name in SLICES}
ILL = {name: "ill" if int(name[1:3]) < 30 else "well" for name in SLICES}


def test_groups_are_folders_of_a_level_by_name_or_lines_of_a_file(tmp_path):
    names = ["T1/anna/1.png", "T1/ben/1.png", "T2/anna/2.png", "odd.png"]
    found, words = groups_of(2, names)
    assert list(found.values()) == ["anna", "ben", "anna", "odd.png"]
    assert words == "3 groups (`anna`, `ben`, `odd.png`), the folders at level 2"
    assert groups_of("2", names)[0] == found
    file = tmp_path / "groups.txt"
    file.write_text("".join(f"{name}\tgroup {index // 2}\n" for index, name in enumerate(names)))
    found, words = groups_of(file, names)
    assert list(found.values()) == ["group 0", "group 0", "group 1", "group 1"]
    assert words == f"2 groups (`group 0`, `group 1`), of {file}"
    assert groups_of(None, names) == (None, "")


REFUSED = [
    (0, "levels of folders begin with 1"),
    (1, "--groups 1: all images are in one group, `a`"),
    ("one.txt", "all images are in one group, `x`"),
    ("few.txt", "no group for 1 of 2 images, such as a/2.png"),
    ("gone.txt", "--groups .*gone.txt: .*lines `name group`"),
]


@pytest.mark.parametrize(("groups", "message"), REFUSED)
def test_groups_that_say_nothing_are_refused(groups, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.txt").write_text("a/1.png x\na/2.png x\n")
    (tmp_path / "few.txt").write_text("a/1.png x\n")
    with pytest.raises(UserError, match=message):
        groups_of(groups, ["a/1.png", "a/2.png"])


def test_whole_groups_are_drawn_by_seed_in_proportion_to_the_classes():
    drawn = draw_share(SLICES, 0.2, 0, ILL, PATIENT)
    patients = Counter(PATIENT[name] for name in drawn)
    assert set(patients.values()) == {25}
    assert Counter(ILL[f"{patient}/00.png"] for patient in patients) == {"ill": 6, "well": 2}
    assert drawn == draw_share(SLICES[::-1], 0.2, 0, ILL, PATIENT) != draw_share(SLICES, 0.2, 1, ILL, PATIENT)


def test_a_group_that_would_be_far_too_much_is_passed_over():
    sizes = {"big": 80, "a": 5, "b": 5, "c": 10}
    groups = {f"{group}/{index}": group for group, size in sizes.items() for index in range(size)}
    for seed in range(5):
        drawn = {groups[name] for name in draw_share(groups, 0.1, seed, None, groups)}
        assert drawn in ({"a", "b"}, {"c"}, {"a", "c"}, {"b", "c"})


def test_a_group_of_several_classes_stays_whole():
    groups = {f"{index:03d}.png": str(index // 10) for index in range(200)}
    classes = {name: str(int(name[2]) > 6) for name in groups}  # of each group seven and three
    drawn = draw_share(groups, 0.1, 0, classes, groups)
    assert set(Counter(groups[name] for name in drawn).values()) == {10}
    assert len(drawn) == 20


def test_each_group_has_its_turn():
    assert groups_in_turn(
        ["a1", "a2", "b1", "a3", "b2"], {"a1": "a", "a2": "a", "a3": "a", "b1": "b", "b2": "b"}
    ) == [*("a1", "b1", "a2", "b2", "a3")]
    assert groups_in_turn(["b", "a"], None) == ["b", "a"]


def test_folders_that_are_groups_are_no_classes(tmp_path):
    classes, words = classes_of(None, SLICES, groups=PATIENT)
    assert classes is None
    assert "the folders at level 1 are groups, and no classes" in words
    with pytest.raises(UserError, match="--class-level 1: no folder"):
        classes_of(None, SLICES, 1, PATIENT)
    (tmp_path / "labels.txt").write_text("".join(f"{name}\t{PATIENT[name]}\n" for name in SLICES))
    with pytest.raises(UserError, match="no class has images of two groups"):
        classes_of(tmp_path / "labels.txt", SLICES, groups=PATIENT)


def test_many_folders_of_few_images_may_be_groups():
    assert "; 40 folders of at most 25 images: if they are patients" in classes_of(None, SLICES)[1]
    assert "name `--groups 1`" in classes_of(None, SLICES)[1]
    for level, names in ((1, SLICES), (None, SLICES[:400])):
        assert "--groups" not in classes_of(None, names, level)[1]
