"""The declared tables: the paper's numbers are the paper's, and wrong declarations are refused."""

import re

import pytest
from config_building import build_model
from lab.plan import changed_config, plan_table
from lab.records import read_kept
from lab.render import paper_number
from lab.show import FilledTable
from lab.tables import DeclarationError, list_tables, load_table

# Column by column, rows in the paper's order; None where the paper has a dash.
PAPER = {
    "objectives": [
        [74.6, 74.9, 74.5, 74.9, 75.3, 75.5],
        [55.3, 56.4, 59.6, 60.4, 59.7, 62.5],
        [82.0, 82.1, 82.2, 82.0, 81.8, 82.1],
        [69.9, 68.7, 69.8, 71.1, 69.5, 71.6],
        [83.8, 83.7, 84.4, 83.3, 83.3, 83.6],
        [72.3, 73.3, 73.8, 72.3, 73.5, 73.5],
    ],
    "comparison": [
        [73.7, 73.4, 75.0, 74.5, 73.7, 74.8, 75.5],
        [None, 52.4, 62.0, 59.6, 53.9, 61.5, 62.5],
        [79.8, 81.6, 82.2, 82.2, 81.5, 81.9, 82.1],
        [None, 63.4, 72.6, 69.8, 62.9, 71.1, 71.6],
        [81.8, 83.5, 84.4, 84.4, 82.7, 83.3, 83.6],
        [None, 69.4, 75.0, 73.8, 67.6, 73.3, 73.5],
    ],
    "segmentation": [
        [39.0, 40.2, 39.3, 39.2, 39.9],
        [45.6, 46.1, 47.0, 45.9, 46.7],
        [49.3, 49.0, 50.4, 50.2, 50.3],
    ],
    "transfer": [[53.6, 64.5, 68.5], [81.4, 86.9, 86.9], [40.5, 44.9, 46.8]],
    "cutting_point": [[84.2, 84.3, 84.3, 84.4, 84.1]],
    "sota": [
        [81.7, 82.0, None, None, None, None, None, 82.1, 82.2, None, None, None, None],
        [82.9, 83.6, 83.6, 83.6, 84.1, 84.4, 85.0, 83.6, 84.4, 83.2, 83.8, 83.9, 85.5],
    ],
    "tokenizers": [[4.1, 68.1, 72.8], [11.7, 89.8, 93.2], [9.1, 72.3, 76.2], [21.9, 92.2, 94.9]],
}
PRETRAIN = "configs/micro/mapet_vit-micro_kclip_1xb32-coslr.py"
PROBE = "configs/micro/vit-micro_1xb128-linear-coslr.py"


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_numbers_are_the_papers_and_are_shown(name):
    table = load_table(f"imagenet/{name}")
    declared = [[paper_number(row, column) for row in table.rows] for column in table.columns]
    assert declared == PAPER[name]
    written = FilledTable(table, [0], {}).markdown().splitlines()
    for place, row in enumerate(table.rows):
        (line,) = [line for line in written if line.startswith(f"| {row.name} |")]
        numbers = [f"{column[place]:.1f}" for column in PAPER[name] if column[place] is not None]
        assert re.findall(r"\d+\.\d", line) == numbers


def test_all_tables_of_the_paper_are_declared_for_imagenet():
    names = list_tables()
    assert {f"imagenet/{name}" for name in PAPER} <= names.keys()
    for data in ("digits", "fashion_mnist"):
        required = {"objectives", "segmentation", "cutting_point", "tokenizers", "transfer"}
        assert {f"{data}/{name}" for name in required} <= names.keys()


def test_numbers_of_the_literature_are_data_and_nothing_runs_for_them():
    plan = plan_table(load_table("imagenet/sota"), [0])
    assert {cell.row for cell in plan.cells} == {"MaPeT, k-CLIP", "MaPeT, VQ-KD"}
    assert len(plan.cells) == 4


def test_each_objective_has_the_rate_with_the_best_mean_of_the_sweep():
    """Chosen among the sweep's records; the longest runs take the rate of the longest that was swept."""
    best: dict[tuple[str, int], tuple[float, float]] = {}
    for record in read_kept().values():
        row = record.get("sweep")
        if row and "float32" not in row and "c = 13" not in row:
            name, epochs, rate = row.rsplit(", ", 2)
            metrics = record["metrics"]
            names = (
                "k-NN, both",
                "logistic regression, both, 10 a class",
                "attentive probe, patch tokens, last layer",
            )
            mean = sum(metrics[metric] for metric in names) / 3
            place = (name, int(epochs.split()[0]))
            best[place] = max(best.get(place, (0.0, 0.0)), (mean, float(rate)))
    assert len(best) == 11
    for row in load_table("fashion_mnist/compute").run_rows:
        epochs = row.options.get("train_cfg.max_epochs", 5)
        swept = max(length for name, length in best if name == row.curve and length <= epochs)
        assert row.options["optim_wrapper.optimizer.lr"] == best[row.curve, swept][1], row.name


def test_rows_of_equal_compute_cost_what_mapet_costs_within_a_tenth():
    filled = FilledTable(load_table("fashion_mnist/compute"), range(3), read_kept(), 2)
    costs = {row: cell.mean for (row, column), cell in filled.grid().items() if "TFLOPs" in column}
    for row in ("MIM, 11 epochs", "PIM, 7 epochs", "PIM, late, 9 epochs", "BEiT, 10 epochs", "CAE, 9 epochs"):
        assert costs[row] == pytest.approx(costs["MaPeT, 5 epochs"], rel=0.1), row


def test_recipes_of_rows_say_the_lengths_that_their_names_promise_and_build():
    for row in load_table("fashion_mnist/compute").run_rows:
        cfg = changed_config(row.pretrain.format(**row.values), row.data.format(seed=0), row.options)
        epochs = int(row.name.split(", ")[-1].split()[0])
        assert cfg.train_cfg.max_epochs == cfg.param_scheduler[1].end == epochs
        if epochs == 5:
            build_model(cfg)


def declare(folder, row="name='a'", column=f"config={PROBE!r}, metric='m'", more="", rows=""):
    """Write a table `mine` of one row, or of `rows`, and one column."""
    rows = rows or f"Row({row})"
    text = "from lab.tables import Column, Row, Table\n"
    text += f"TABLES = dict(mine=Table(title='x', dataset='digits', rows=[{rows}], "
    text += f"columns=[Column(name='b', unit='%', {column})], {more}))\n"
    (folder / "own.py").write_text(text)


REFUSED = [
    (dict(rows="Row('a'), Row('a')"), "two rows named 'a'"),
    (dict(column=f"config={PROBE!r}, metric='m', paper=dict(c=1.0)"), "row of the paper.*'c'.*there are: a"),
    (dict(row="name='a', columns=['z']"), "column 'z'.*there are: b"),
    (dict(rows=f"Row('a'), Row('c', {PRETRAIN!r}, start='a')"), "start 'a'"),
    (dict(more="baseline='c'"), "baseline 'c'.*there are: a"),
    (dict(column="config='configs/nothing.py', metric='m'"), "configs/nothing.py`, which does not exist"),
    (dict(column="config='configs/{size}.py', metric='m'"), r"no value for \{size\}"),
    (dict(row=f"name='a', pretrain={PRETRAIN!r}", column=f"config={PRETRAIN!r}, metric='m'"), "leaves 0"),
    (dict(row=f"name='a', pretrain={PRETRAIN!r}, tokenizer='configs/micro/dalle.py'"), "reads no tokens of"),
]


@pytest.mark.parametrize(("declared", "noun"), REFUSED)
def test_a_wrong_declaration_is_refused_by_the_name_of_its_fault(declared, noun, tmp_path):
    declare(tmp_path, **declared)
    with pytest.raises(DeclarationError, match=noun):
        plan_table(load_table("own/mine", tmp_path), [0])


def test_unknown_names_are_answered_with_those_that_are_there():
    with pytest.raises(DeclarationError, match=r"table 'sota'.*there are: objectives"):
        load_table("digits/sota")
    with pytest.raises(DeclarationError, match=r"table 'mnist/objectives'.*there are: .*digits/objectives"):
        load_table("mnist/objectives")
    filled = FilledTable(load_table("digits/objectives"), [0], {})
    with pytest.raises(DeclarationError, match=r"row 'DINO'.*there are: tokens alone, no pre-training, MIM"):
        filled.wanted(["MIM", "DINO"])
    with pytest.raises(DeclarationError, match="column 'knn'"):
        filled.wanted(columns=["k-NN", "knn"])
