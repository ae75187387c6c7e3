"""Stages of a job: what is done is passed over, a failure is one line and costs nothing that was done."""

import io
import re
import sys
from pathlib import Path

import pytest

from mapet_mm.cli import stages
from mapet_mm.cli.stages import Stage, run_stages
from mapet_mm.utils.errors import UserError


def stage(title: str, code: str, result: Path, **options) -> Stage:
    return Stage(title, [sys.executable, "-c", code], f"tool {title}", result, **options)


def making(path: Path) -> str:
    return f"open({str(path)!r}, 'a').write('x'); print('made')"


def test_done_stages_are_passed_over_and_the_rest_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # Python would write the error first
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    failing = "print('working'); raise SystemExit('error: no disk left')"
    with pytest.raises(UserError) as raised:
        run_stages([stage("first", making(one), one), stage("second", failing, two)], tmp_path / "logs")
    log = tmp_path / "logs/2-second.log"
    assert str(raised.value) == (
        f"second: no disk left (all it said: {log}; once the cause is corrected, the same command goes on "
        "from here)"
    )
    assert log.read_text() == "working\nerror: no disk left\n"
    made = []
    run_stages(
        [
            stage("first", making(one), one, made=lambda: made.append("first")),
            stage("second", making(two), two, made=lambda: made.append("second")),
            stage("third", making(three), three, there=lambda: "by hand"),
        ],
        tmp_path / "logs",
    )
    assert made == ["second"]
    assert one.read_text() == two.read_text() == "x"
    assert not three.exists()
    printed = capsys.readouterr().out.splitlines()
    assert [line[:18] for line in printed[-4:]] == [
        "[1/3] first   is t",
        "[2/3] second  tool",
        "[2/3] second  done",
        "[3/3] third   is t",
    ]
    assert printed[-1].endswith(f"is there: {three} (by hand)")


def test_a_result_that_is_not_what_it_should_be_is_made_again(tmp_path):
    result = tmp_path / "result"
    result.write_text("of another checkpoint: ")
    run_stages([stage("export", making(result), result, there=lambda: None)], tmp_path / "logs")
    assert result.read_text() == "of another checkpoint: x"


def test_a_failure_without_a_word_says_its_exit_code(tmp_path):
    with pytest.raises(UserError, match="first: exit code 3 "):
        run_stages([stage("first", "raise SystemExit(3)", tmp_path / "one")], tmp_path)


def test_bars_are_lines_and_everything_is_copied():
    printed = b"fitting\r 10%|#  | 1/10\r 20%|## | 2/10\nd\xc3\xa9j\xc3\xa0 \xff\n\n  last"
    copy = io.BytesIO()
    assert list(stages._lines(io.BufferedReader(io.BytesIO(printed)), copy)) == [
        "fitting",
        "10%|#  | 1/10",
        "20%|## | 2/10",
        "déjà \ufffd",
        "last",
    ]
    assert copy.getvalue() == printed


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("extracting tokens:  25%|##5  | 25/100", 90),
        ("Epoch(train) [1][10/45]  lr: 3.0607e-04  eta: 0:00:33  time: 0.9", 33),
        ("Epoch(train) [1][10/45]  lr: 3.0607e-04  eta: 1 day, 2:00:05  time: 0.9", 93605),
        ("Epoch(train) [1][10/45]  lr: 3.0607e-04  eta: 2 days, 0:00:05  time: 0.9", 172805),
        ("sampling:   0%|     | 0/100", None),
        ("loading", None),
    ],
)
def test_the_time_left_is_read_from_a_stages_own_progress(line, left):
    assert stages._left(line, elapsed=30.0) == left


def test_the_time_left_counts_the_later_stages_from_the_second_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr(stages, "REDRAW_SECONDS", 0.0)
    half = "print(' 50%|##  |')"
    made = [
        stage("one", half, tmp_path / "1", seconds=1e6),
        stage("two", half, tmp_path / "2"),
        stage("three", half, tmp_path / "3", seconds=7200),
    ]
    run_stages(made, tmp_path)
    drawn = [line for line in capsys.readouterr().out.split("\r") if "50%" in line]
    told = [line.partition("  ")[2].strip().partition("|")[0].strip() for line in drawn]
    assert told[:2] == ["50%", "2 h 00 min left in all"]  # nothing is known of what comes after the first
    assert re.fullmatch(r"\d+ s left in all", told[2])


def test_long_stages_are_announced_first(tmp_path, capsys):
    (tmp_path / "1").touch()
    run_stages([stage("one", "", tmp_path / "1"), stage("two", "", tmp_path / "2", seconds=7200)], tmp_path)
    assert capsys.readouterr().out.startswith("two will take about 2 h 00 min on this machine\n[1/2] one")


def test_durations_are_read_at_a_glance():
    assert [stages._clock(seconds) for seconds in (4.4, 65, 3600, 100000)] == [
        "4 s",
        "1 min 05 s",
        "1 h 00 min",
        "27 h 46 min",
    ]
