"""Differences of a table's rows by seed, and pictures of tables: by value, and with cells missing."""

import runpy
import sys
from dataclasses import replace

import pytest
import torch
from config_building import ROOT
from fake_project import declare, fill, write_project
from scipy.stats import ttest_rel

from mapet_mm.experiments.compute import TERAFLOPS
from mapet_mm.experiments.differences import paired_difference, render_differences
from mapet_mm.experiments.picture import draw_tables
from mapet_mm.experiments.render import render_markdown, summarise
from mapet_mm.experiments.table import Column, DeclarationError, Row, TableDeclaration, load_table

ROWS = [Row("old"), Row("new"), Row("other", curve="new")]
COLUMNS = [
    Column("probe", "%", "probe.py", "accuracy/top1"),
    Column("tuned", "%", "tuned.py", "accuracy/top1"),
    Column("pre-training", "minutes", "probe.py", "pre-training/minutes"),
]
TABLE = TableDeclaration("t", "digits", "A table", ROWS, COLUMNS, baseline="old")


def cells(**of_row):
    """A grid with these values of each row's seeds 0, 1, ...; None for a seed that is not done."""
    grid = {}
    for row in ROWS:
        for column in COLUMNS:
            values = dict(enumerate(of_row.get(row.name, ())))
            done = {seed: value for seed, value in values.items() if value is not None}
            grid[row.name, column.heading] = summarise(done.values(), done) or "not run"
    return grid


def test_differences_are_those_of_the_seeds_that_both_have():
    one = summarise([3.0, 5.5, 9.0], [0, 1, 3])
    other = summarise([1.0, 2.0, 7.5, 5.0], [0, 1, 2, 3])
    difference = paired_difference(one, other)
    assert difference[:3] == pytest.approx((19 / 6, (13 / 12) ** 0.5, 3))
    assert difference.chance == pytest.approx(ttest_rel([3.0, 5.5, 9.0], [1.0, 2.0, 5.0]).pvalue)
    assert paired_difference(one, "not run") is None
    assert paired_difference(summarise([1.0], [5]), other) is None
    assert paired_difference(summarise([2.0], [0]), other) == (1.0, None, 1, None)


def test_seeds_that_all_differ_by_the_same_have_no_chance():
    assert paired_difference(summarise([2.0, 3.0], [0, 1]), summarise([1.0, 2.0], [0, 1])).chance is None


def test_rounding_makes_no_seeds_differ():
    """97.2 - 97.1 is not 97.3 - 97.2 in binary: a p of 5e-14 of nothing."""
    tenths = paired_difference(summarise([97.2, 97.3], [0, 1]), summarise([97.1, 97.2], [0, 1]))
    assert tenths == (pytest.approx(0.1), 0.0, 2, None)
    # One image of 10,000, in the float32 of MMPretrain's accuracy.
    ours, theirs = (torch.tensor(right).float() * (100 / 10_000) for right in ([9123, 9177], [9122, 9176]))
    image = paired_difference(summarise(ours.tolist(), [0, 1]), summarise(theirs.tolist(), [0, 1]))
    assert image == (pytest.approx(0.01, abs=1e-5), 0.0, 2, None)
    # One image of 10,000 more in one of the seeds is no rounding.
    theirs[1] -= 0.01
    assert (
        paired_difference(summarise(ours.tolist(), [0, 1]), summarise(theirs.tolist(), [0, 1])).chance > 0.1
    )


def test_of_seeds_that_all_differ_by_the_same_the_table_does_not_speak_as_of_one():
    lines = render_differences(TABLE, cells(old=[60.0, 61.0], new=[62.0, 63.0])).splitlines()
    assert lines[3] == "| new | +2.0 ± 0.0 | +2.0 ± 0.0 |"
    assert lines[-1].endswith("In no comparison do the differences of the seeds differ, so none has a p.")


def test_a_cell_of_fewer_seeds_than_the_table_says_so():
    text = render_markdown(TABLE, cells(old=[60.0, 61.0, 63.0], new=[62.0, None, 66.0], other=[1.0]), [])
    assert "| old | 61.3 ± 1.5 |" in text
    assert "| new | **64.0** ± 2.8 (2 seeds) |" in text
    assert "| other | 1.0 (1 seed) |" in text


def test_two_rows_of_one_curve_may_have_the_same_compute_and_other_seeds():
    compute = replace(COLUMNS[2], metric=TERAFLOPS)
    grid = cells(new=[2.0, 2.0], other=[2.0]) | {("old", compute.heading): summarise([1.0], [0])}
    figure = draw_tables([(replace(TABLE, columns=[COLUMNS[0], compute]), grid)])
    (panel,) = figure.subfigs[0].axes
    (curve,) = panel.containers
    assert list(curve.lines[0].get_xdata()) == [2.0, 2.0]


def test_each_row_less_the_baseline_stands_below_the_table():
    text = render_differences(TABLE, cells(old=[60.0, 61.0, 63.0], new=[62.0, 62.5, 66.0]))
    lines = text.splitlines()
    assert lines[1] == "| less old | probe (%) | tuned (%) |"
    assert lines[3] == "| new | +2.2 ± 0.8, p 0.04 | +2.2 ± 0.8, p 0.04 |"
    assert "not corrected for the number of comparisons" in lines[5]
    # Student's t with two degrees of freedom: 4.303 / sqrt(3); 5 % of two comparisons.
    assert "from 2.5 standard deviations with 3 seeds on" in lines[6]
    assert "about 0.1 of the 2 comparisons would be, here 2 are" in lines[6]
    assert len(lines) == 7


def test_of_one_seed_nothing_is_said_about_chance():
    lines = render_differences(TABLE, cells(old=[60.0], new=[62.0])).splitlines()
    assert lines[3] == "| new | +2.0 | +2.0 |"
    assert lines[-1] == "- One seed: nothing says which of these differences chance would make."


@pytest.mark.parametrize("of_row", [{}, dict(new=[1.0, 2.0]), dict(old=[1.0, 2.0])])
def test_without_anything_to_compare_nothing_is_added(of_row):
    assert render_differences(TABLE, cells(**of_row)) == ""


def test_the_largest_cost_is_not_the_best():
    text = render_markdown(TABLE, cells(old=[60.0], new=[62.0]), [])
    assert "| new | **62.0** | **62.0** | 62.0 |" in text


def test_the_most_dead_tokens_are_not_the_best():
    columns = [Column(name, "", "probe.py", f"tokens/{name}") for name in ("dead", "perplexity", "purity")]
    grid = {
        (row.name, column.heading): summarise([value], [0])
        for row, value in zip(ROWS, (1.0, 96.0, 2.0), strict=True)
        for column in columns
    }
    text = render_markdown(replace(TABLE, columns=columns), grid, [])
    assert "| new | 96.0 | 96.0 | **96.0** |" in text


def test_a_baseline_that_is_no_row_is_refused(tmp_path):
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits.py").touch()
    (tmp_path / "digits/mine.py").write_text(
        "title = 'x'\nbaseline = 'c'\nrows = [dict(name='a')]\n"
        "columns = [dict(name='b', unit='%', config='configs/micro/kclip.py', metric='m')]\n"
    )
    with pytest.raises(DeclarationError, match="`baseline` names 'c', which is no row; rows are a"):
        load_table("mine", "digits", tmp_path)


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]


def test_a_picture_has_a_dot_per_row_and_names_what_is_missing():
    figure = draw_tables([(TABLE, cells(old=[60.0, 61.0, 63.0], new=[62.0]))])
    panels = [axes for band in figure.subfigs for axes in band.axes]
    assert len(panels) == 3
    assert [bars.lines[0].get_xdata()[0] for bars in panels[0].containers] == pytest.approx([184 / 3, 62.0])
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["old", "new", "other"]
    written = texts(figure)
    assert written.count("not run") == 3
    assert any("Mean over 1 or 3 seeds; bars: sample standard deviation" in text for text in written)
    assert any("Missing: 3 of 9 cells." in text for text in written)


def over_compute(*costs: float) -> tuple[TableDeclaration, dict]:
    """A table of two seeds whose rows have these costs, and its cells."""
    teraflops = Column("pre-training", "TFLOPs", "probe.py", "pre-training/teraflops")
    table = TableDeclaration("t", "digits", "A table", ROWS, [teraflops, *COLUMNS])
    grid = cells(old=[60.0, 62.0], new=[70.0, 71.0], other=[65.0, 66.0])
    for row, cost in zip(ROWS, costs, strict=True):
        grid[row.name, teraflops.heading] = summarise([cost] * 2, [0, 1])
    return table, grid


def test_a_table_with_compute_is_drawn_as_curves_over_it():
    """The rows of one curve in the order of their compute; no other cost has a panel."""
    table, grid = over_compute(10.0, 30.0, 20.0)
    figure = draw_tables([(table, grid)])
    panels = [axes for band in figure.subfigs for axes in band.axes]
    assert len(panels) == 2
    lines = [bars.lines[0] for bars in panels[0].containers]
    assert len(panels[0].get_yticks()) > 0
    assert [list(line.get_xdata()) for line in lines] == [[10.0], [20.0, 30.0]]
    assert [list(line.get_ydata()) for line in lines] == [[61.0], [65.5, 70.5]]


def legend(table, grid) -> tuple[list, list[str]]:
    """The panels of a table over compute, and what its legend says."""
    (band,) = draw_tables([(table, grid)]).subfigs
    return band.axes, [text.get_text() for text in band.legends[0].get_texts()]


def test_a_row_without_compute_is_a_dashed_line_with_its_name():
    """0 has no place on a logarithmic axis."""
    table, grid = over_compute(0.0, 30.0, 20.0)
    panels, names = legend(table, grid)
    level = panels[0].lines[0]
    assert (level.get_linestyle(), list(level.get_ydata())) == ("--", [61.0, 61.0])
    assert [list(bars.lines[0].get_xdata()) for bars in panels[0].containers] == [[20.0, 30.0]]
    assert panels[0].get_xlim()[0] > 10
    assert names == ["old", "new"]


def test_the_legend_of_curves_says_in_which_panels_one_is_missing():
    teraflops = Column("pre-training", "TFLOPs", "probe.py", "pre-training/teraflops")
    table = TableDeclaration("t", "digits", "A table", [*ROWS, Row("none")], [teraflops, *COLUMNS])
    grid = cells(old=[60.0], new=[70.0], other=[65.0])
    grid |= {("none", column.heading): "not run" for column in COLUMNS}
    grid |= {(row.name, teraflops.heading): summarise([9.0], [0]) for row in table.rows}
    grid["old", COLUMNS[0].heading] = "not run"
    assert legend(table, grid)[1] == ["old (missing in probe)", "new", "none (missing)"]


def test_five_panels_leave_the_sixth_place_empty():
    columns = [replace(COLUMNS[0], name=f"probe {number}") for number in range(5)]
    grid = {(row.name, column.heading): "not run" for row in ROWS for column in columns}
    (band,) = draw_tables([(replace(TABLE, columns=columns), grid)]).subfigs
    assert [axes.get_visible() for axes in band.axes] == [True] * 5 + [False]


def test_a_difference_that_one_of_the_two_has_not_is_an_empty_cell():
    grid = cells(old=[60.0, 61.0], new=[62.0, 64.0])
    grid["new", COLUMNS[1].heading] = "not run"
    assert render_differences(TABLE, grid).splitlines()[3].endswith("|  |")


def test_curves_without_a_point_have_no_scale():
    table = replace(TABLE, columns=[replace(COLUMNS[2], metric="pre-training/teraflops"), COLUMNS[0]])
    (band,) = draw_tables([(table, cells())]).subfigs
    assert list(band.axes[0].get_yticks()) == []


def test_nothing_measured_is_a_picture_too():
    figure = draw_tables([(replace(TABLE, title="$5 and $6"), cells())])
    assert "Nothing has been measured yet." in texts(figure)
    title = next(text for band in figure.subfigs for text in band.texts if text.get_text() == "$5 and $6")
    assert not title.get_parse_math()


def test_one_command_draws_what_there_is(tmp_path, monkeypatch, capsys):
    write_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    declare(tmp_path)
    fill([0], rows=["scratch"])
    arguments = ["small", "small", "--out", "out", "--seeds", "2", "--picture", "sub/picture.svg"]
    monkeypatch.setattr(sys, "argv", ["draw_tables.py", *arguments])
    runpy.run_path(str(ROOT / "tools/draw_tables.py"), run_name="__main__")
    assert (tmp_path / "sub/picture.svg").read_bytes().startswith(b"<?xml")
    assert "A small table: 2 of 12 results are there" in capsys.readouterr().out


def test_rows_and_columns_are_drawn_of_tables_that_have_them(tmp_path, monkeypatch, capsys):
    write_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    declare(tmp_path)
    fill([0], rows=["scratch"])
    drawn = []
    monkeypatch.setattr(
        "mapet_mm.experiments.picture.draw_tables", lambda f: drawn.extend(f) or draw_tables(f)
    )
    arguments = ["draw_tables.py", "small", "--out", "out", "--picture", "picture.svg", "--rows", "scratch"]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(ROOT / "tools/draw_tables.py"), run_name="__main__")
    ((table, _),) = drawn
    assert [row.name for row in table.rows] == ["scratch"]
    assert table.only([], ["elsewhere"]) == table, "a table without these columns has all of its own"
    monkeypatch.setattr(sys, "argv", [*arguments, "scratched"])
    with pytest.raises(SystemExit) as error:
        runpy.run_path(str(ROOT / "tools/draw_tables.py"), run_name="__main__")
    assert (
        "--rows names 'scratched', which is no row; rows are scratch, "
        in f"{error.value}{capsys.readouterr()}"
    )


def test_a_picture_of_no_seed_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["draw_tables.py", "small", "--picture", "picture.png", "--seeds", "0"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "tools/draw_tables.py"), run_name="__main__")
    assert "argument --seeds: 0: one or more" in capsys.readouterr().err


def test_a_picture_of_an_unknown_kind_is_refused_before_anything_is_read(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["draw_tables.py", "nothing", "--picture", "picture.doc"])
    with pytest.raises(SystemExit) as error:
        runpy.run_path(str(ROOT / "tools/draw_tables.py"), run_name="__main__")
    assert (
        "picture.doc: the name has to end in one of .png, .svg, .pdf" in f"{error.value}{capsys.readouterr()}"
    )
