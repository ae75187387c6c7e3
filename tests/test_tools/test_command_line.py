"""`--cfg-options` reads values as MMEngine does, but for the spaces and the paths of files, which stay."""

import argparse
import runpy

import pytest
from config_building import ROOT
from mmengine.config import DictAction

TOOL = runpy.run_path(str(ROOT / "tools/command_line.py"))


def parsed(*pairs: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    TOOL["add_config_options"](parser)
    return parser.parse_args(["--cfg-options", *pairs])


@pytest.mark.parametrize("value", ["My Drive/x", "a=4, lr=0.1/x", "run [1]", "run (1)", "'x'", "(1, 2)"])
def test_the_path_of_a_file_that_is_there_arrives_whole(value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / value).mkdir(parents=True)
    options = parsed("n=1", f"a.b={value}", f"new={value}/1.pth").cfg_options
    assert options == {"n": 1, "a.b": value, "new": f"{value}/1.pth"}


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("My Drive/new.pth", "My Drive/new.pth"),
        (" 0.1 ", 0.1),
        ("[My Drive/x, 3, None]", ["My Drive/x", 3, None]),
        ("[(1, a b), [c d, 2]]", [(1, "a b"), ["c d", 2]]),
    ],
)
def test_texts_keep_their_spaces_alone_and_in_lists(value, found):
    assert parsed(f"a={value}").cfg_options == {"a": found}


@pytest.mark.parametrize(
    "value", ["1", "1e-3", "true", "None", "1,2", "[1, 2]", "(1,[2, x])", "'x'", "a=b", ""]
)
def test_other_values_are_those_of_mmengine(value):
    parser = argparse.ArgumentParser()
    parser.add_argument("--cfg-options", nargs="+", action=DictAction)
    theirs = parser.parse_args(["--cfg-options", f"a={value}"])
    assert parsed(f"a={value}").cfg_options == theirs.cfg_options


def test_what_was_given_goes_on_to_the_next_command_and_a_word_without_a_value_is_refused(capsys):
    args = parsed("a=1", "b=My Drive/x")
    assert TOOL["given_options"](args) == ["--cfg-options", "a=1", "b=My Drive/x"]
    assert TOOL["given_options"](argparse.Namespace()) == []
    with pytest.raises(SystemExit):
        parsed("a")
    assert "--cfg-options a: it takes KEY=VALUE" in capsys.readouterr().err
