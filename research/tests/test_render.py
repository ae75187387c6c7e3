"""Tables by value: differences of rows by seed, Markdown, and pictures with cells missing."""

from dataclasses import replace

import pytest
from lab.picture import TERAFLOPS, draw_tables
from lab.render import difference, holm, render_differences, render_markdown, summarise
from lab.tables import Column, Row, Table
from scipy.stats import ttest_ind

from mapet_mm.utils.errors import UserError

ROWS = [Row("old"), Row("new"), Row("other", curve="new")]
COLUMNS = [
    Column("probe", "%", "probe.py", "accuracy/top1"),
    Column("tuned", "%", "tuned.py", "accuracy/top1"),
    Column("pre-training", "minutes", "probe.py", "pre-training/minutes"),
]
TABLE = Table("A table", "digits", ROWS, COLUMNS, baseline="old")


def measured(*values):
    """A cell with these values of the seeds 0, 1, ...; None for a seed that is not done."""
    return summarise({seed: value for seed, value in enumerate(values) if value is not None})


def cells(**of_row):
    """A grid with these values in each column of a row."""
    places = [(row.name, column.heading) for row in ROWS for column in COLUMNS]
    return {place: measured(*of_row.get(place[0], ())) or "not run" for place in places}


def test_differences_are_of_the_seeds_that_both_have():
    one, other = measured(3.0, 5.5, None, 9.0), measured(1.0, 2.0, 7.5, 5.0)
    found = difference(one, other)
    assert found[:3] == pytest.approx((19 / 6, ((109 / 12 + 13 / 3) / 3) ** 0.5, 3))
    welch = ttest_ind([3.0, 5.5, 9.0], [1.0, 2.0, 5.0], equal_var=False)  # pairs would give 0.03
    assert found.chance == pytest.approx(welch.pvalue)
    assert found.chance > 0.2
    assert difference(one, "not run") is None
    assert difference(measured(None, None, 1.0), one) is None
    assert difference(measured(2.0), other) == (1.0, None, 1, None)
    assert difference(measured(2.0, 2.0), measured(1.0, 1.0)) == (1.0, 0.0, 2, None)


def test_holm_multiplies_the_smallest_by_all_and_keeps_the_order():
    """Holm's own form: p(i) x (m - i + 1), never below the one before, at most 1."""
    assert holm([0.04, 0.01, 0.03, 0.6]) == pytest.approx([0.09, 0.04, 0.09, 0.6])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_comparison_without_p_takes_no_other_ones_significance():
    """Wherever it stands: the others are corrected as if it had not been made."""
    nan = float("nan")
    for chances in ([nan, 0.01, 0.04], [0.01, nan, 0.04], [0.01, 0.04, nan]):
        corrected = holm(chances)
        assert sorted(one for one in corrected if one == one) == pytest.approx([0.02, 0.04])
        assert [one != one for one in corrected] == [chance != chance for chance in chances]
    grid = cells(old=[60.0, 60.1, 60.2], new=[62.0, 62.1, 62.2], other=[60.0, nan, 60.6])
    note = render_differences(TABLE, grid).splitlines()[-1]
    assert note == "- Holm's correction for 2 comparisons leaves p below 0.05 in: new (probe); new (tuned)."


def test_a_note_names_the_differences_that_remain_after_holms_correction():
    grid = cells(old=[60.0, 60.1, 60.2], new=[62.0, 62.1, 62.2], other=[60.0, 60.3, 60.6])
    note = render_differences(TABLE, grid).splitlines()[-1]
    assert note == "- Holm's correction for 4 comparisons leaves p below 0.05 in: new (probe); new (tuned)."
    grid = cells(old=[60.0, 61.0, 63.0], new=[62.0, 62.5, 66.0])
    assert render_differences(TABLE, grid).endswith("leaves p below 0.05 in: no cell.\n")


@pytest.mark.parametrize(
    ("old", "new", "shown", "note"),
    [
        ([60.0, 61.0, 63.0], [62.0, 62.5, 66.0], "+2.2 ± 1.5, p 0.24", "Holm's correction for 2"),
        ([60.0, 61.0], [62.0, 63.0], "+2.0 ± 0.7, p 0.11", "Holm's correction for 2"),
        ([60.0, 61.0], [62.0, float("nan")], "+nan ± nan, p nan", "no cell"),
        ([60.0], [62.0], "+2.0", "may be chance"),
    ],
)
def test_each_row_less_the_baseline_stands_below_the_table(old, new, shown, note):
    lines = render_differences(TABLE, cells(old=old, new=new)).splitlines()
    assert lines[1] == "| less old | probe (%) | tuned (%) |"
    assert lines[3] == f"| new | {shown} | {shown} |"
    assert note in lines[-1]
    assert len(lines) == (6 if len(old) == 1 else 7)


@pytest.mark.parametrize("of_row", [{}, dict(new=[1.0, 2.0]), dict(old=[1.0, 2.0])])
def test_without_anything_to_compare_nothing_is_added(of_row):
    assert render_differences(TABLE, cells(**of_row)) == ""
    assert render_differences(replace(TABLE, baseline=None), cells(old=[1.0], new=[2.0])) == ""


def test_a_cell_of_fewer_seeds_than_the_table_says_so_and_the_largest_cost_is_not_the_best():
    text = render_markdown(TABLE, cells(old=[60.0, 61.0, 63.0], new=[62.0, None, 66.0], other=[1.0]), [])
    assert "| old | 61.3 ± 1.5 |" in text
    assert "| new | **64.0** ± 2.8 (2 seeds) | **64.0** ± 2.8 (2 seeds) | 64.0 ± 2.8 (2 seeds) |" in text
    assert "| other | 1.0 (1 seed) |" in text


def test_the_most_dead_tokens_are_not_the_best():
    columns = [Column(name, "", "probe.py", f"tokens/{name}") for name in ("dead", "perplexity", "purity")]
    values = zip(ROWS, (1.0, 96.0, 2.0), strict=True)
    grid = {(row.name, column.heading): measured(value) for row, value in values for column in columns}
    text = render_markdown(replace(TABLE, columns=columns), grid, [])
    assert "| new | 96.0 | 96.0 | **96.0** |" in text


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]


def test_a_picture_has_a_dot_per_row_and_names_what_is_missing():
    figure = draw_tables([(TABLE, cells(old=[60.0, 61.0, 63.0], new=[62.0]))])
    panels = [axes for band in figure.subfigs for axes in band.axes]
    assert len(panels) == 3
    assert [bars.lines[0].get_xdata()[0] for bars in panels[0].containers] == pytest.approx([184 / 3, 62.0])
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["old", "new", "other"]
    assert texts(figure).count("not run") == 3
    assert any("Missing: 3 of 9 cells." in text for text in texts(figure))


def over_compute(*costs: float) -> tuple[Table, dict]:
    teraflops = Column("pre-training", "TFLOPs", "probe.py", TERAFLOPS)
    grid = cells(old=[60.0, 62.0], new=[70.0, 71.0], other=[65.0, 66.0])
    for row, cost in zip(ROWS, costs, strict=True):
        grid[row.name, teraflops.heading] = measured(cost, cost)
    return replace(TABLE, columns=[teraflops, *COLUMNS]), grid


def test_a_table_with_compute_is_drawn_as_curves_over_it():
    (band,) = draw_tables([over_compute(10.0, 30.0, 20.0)]).subfigs
    assert len(band.axes) == 2
    lines = [bars.lines[0] for bars in band.axes[0].containers]
    assert [list(line.get_xdata()) for line in lines] == [[10.0], [20.0, 30.0]]
    assert [list(line.get_ydata()) for line in lines] == [[61.0], [65.5, 70.5]]
    assert [text.get_text() for text in band.legends[0].get_texts()] == ["old", "new"]
    table, grid = over_compute(10.0, 30.0, 20.0)
    with pytest.raises(UserError, match="no row has both pre-training"):
        draw_tables([(table, dict.fromkeys(grid, "not run"))])
