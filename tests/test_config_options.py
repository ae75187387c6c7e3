"""`--cfg-options KEY=VALUE` of the tools."""

import argparse

import pytest

from mapet_mm.utils.config import ConfigOptions


def parsed(*words: str) -> dict:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cfg-options", nargs="+", action=ConfigOptions)
    return parser.parse_args(["--cfg-options", *words]).cfg_options


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("my runs/epoch 2.pth", "my runs/epoch 2.pth"),
        ("'my runs/a, b.pth'", "my runs/a, b.pth"),
        ('"my runs/a, b.pth"', "my runs/a, b.pth"),
        ("a = b", "a = b"),
        (" 3 ", 3),
        ("'0.5'", 0.5),
        ("True", True),
        ("None", None),
        ("", ""),
    ],
)
def test_a_value_without_brackets_keeps_its_spaces(value, expected):
    """MMEngine takes them out, and another file may be loaded."""
    assert parsed(f"model.key={value}") == {"model.key": expected}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1,2, 3", [1, 2, 3]),
        ("[a, b]", ["a", "b"]),
        ("(1, 2)", (1, 2)),
        ("'[1, 2]'", [1, 2]),
        ("'a','b'", ["a", "b"]),
        ('"a","b"', ["a", "b"]),
        ("[(1, 2), [a, b], c]", [(1, 2), ["a", "b"], "c"]),
    ],
)
def test_lists_and_tuples_are_read_as_by_mmengine(value, expected):
    assert parsed(f"key={value}", "other=1") == {"key": expected, "other": 1}
