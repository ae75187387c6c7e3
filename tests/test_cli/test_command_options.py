"""Options of a dataclass, on a command line and in Python."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import pytest

from mapet_mm.cli.command_options import (
    FLAG,
    PATH,
    TEXT,
    Option,
    OptionError,
    Options,
    number,
    one_of,
    options_table,
    parse_options,
    whole_number,
)

SHARE = number("a share", lambda share: 0 <= share <= 1)


@dataclass(frozen=True, kw_only=True)
class Baking(Options):
    """Options of each kind."""

    flour: Annotated[Path, Option(PATH, "where it is", is_positional=True, recorded="always")]
    oven: Annotated[str, Option(TEXT, "its name", recorded="never")]
    shape: Annotated[str, Option(one_of("round", "long"), "of the bread")] = "round"
    num_loaves: Annotated[int, Option(whole_number("1 or more", lambda count: count > 0), "100 % each")] = 1
    heat: Annotated[tuple[float, ...] | None, Option(SHARE, "at both ends", "even", "PART", num_values=2)] = (
        None
    )
    seeds: Annotated[tuple[str, ...] | None, Option(TEXT, "on top", num_values="+")] = None
    is_sweet: Annotated[bool, Option(FLAG, "with sugar")] = False


def parsed(*words: str) -> Baking:
    return parse_options(Baking, ["mill", "--oven", "old", *words], "bake", "Bread.")


def test_a_command_line_and_python_give_equal_options():
    words = ["--num-loaves", "3", "--heat", "0.5", "1", "--seeds", "poppy", "--is-sweet"]
    options = Baking(flour="mill", oven="old", num_loaves="3", heat=[0.5, 1], seeds=["poppy"], is_sweet=True)
    assert parsed(*words) == options
    assert (options.flour, options.num_loaves, options.heat) == (Path("mill"), 3, (0.5, 1.0))
    assert replace(options, num_loaves=4).heat == (0.5, 1.0)
    assert parsed() == Baking(flour="mill", oven="old")


@pytest.mark.parametrize(
    ("words", "options", "said"),
    [
        (["--shape", "flat"], dict(shape="flat"), "--shape must be round or long, not 'flat'"),
        (["--num-loaves", "0"], dict(num_loaves="0"), "--num-loaves must be 1 or more, not '0'"),
        (["--num-loaves", "1.5"], dict(num_loaves="1.5"), "--num-loaves must be 1 or more, not '1.5'"),
        (["--heat", "1", "nan"], dict(heat=["1", "nan"]), "--heat must be a share, not ['1', 'nan']"),
    ],
)
def test_what_cannot_be_is_refused_by_both(capsys, words, options, said):
    with pytest.raises(SystemExit):
        parsed(*words)
    assert f"bake: error: {said}\n" in capsys.readouterr().err
    with pytest.raises(OptionError) as refused:
        Baking(flour="mill", oven="old", **options)
    assert str(refused.value) == said


def test_python_values_of_another_type_or_number_are_refused():
    for wrong in (dict(num_loaves=1.5), dict(is_sweet=1), dict(heat=0.5), dict(heat=[0.5]), dict(seeds=[])):
        with pytest.raises(OptionError, match="--"):
            Baking(flour="mill", oven="old", **wrong)


def test_the_home_folder_may_be_written_in_python(monkeypatch):
    monkeypatch.setenv("HOME", "/home/baker")
    assert Baking(flour="~/flour", oven="~/stone").flour == Path("/home/baker/flour")
    assert Baking(flour="~flour", oven="").flour == Path("~flour")  # no user of this name is looked up


def test_one_text_is_one_value():
    assert Baking(flour="mill", oven="old", seeds="poppy").seeds == ("poppy",)


def test_what_was_made_keeps_what_decides_it():
    """An option that is newer than what was made is kept only if it is given."""
    assert parsed().recorded() == dict(flour=Path("mill"))
    assert parsed("--num-loaves", "2").recorded() == dict(flour=Path("mill"), num_loaves=2)


def test_help_and_page_say_the_same(capsys):
    with pytest.raises(SystemExit):
        parsed("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "--num-loaves NUM_LOAVES 100 % each (default: 1)" in shown
    assert "--heat PART PART at both ends (default: even)" in shown
    lines = options_table(Baking).splitlines()
    assert lines[3:5] == [
        "| `--shape {round,long}` | of the bread | round |",
        "| `--num-loaves NUM_LOAVES` | 100 % each | 1 |",
    ]
    assert len(lines) == 2 + 6
