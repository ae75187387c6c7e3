"""The declared tables: the paper's numbers are the paper's, and wrong declarations are refused."""

import pytest
from config_building import build_model
from experiments.declaration import DeclarationError, list_datasets, list_tables, load_table
from experiments.fill import TableFiller
from experiments.plan import plan_table
from fake_project import PRETRAIN, PROBE, declare_mine

from mapet_mm.utils.config import read_config

NAMES = ["comparison", "cutting_point", "objectives", "segmentation", "tokenizers", "transfer"]

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


@pytest.fixture(autouse=True)
def _in_the_repository(repository):
    pass


def test_every_table_of_the_paper_is_declared_for_both_data_sets():
    """But for the literature's numbers, which stand beside no digits run; digits have one table more."""
    assert list(list_tables("digits")) == sorted([*NAMES, "downstream"])
    assert list(list_tables("imagenet")) == sorted([*NAMES, "sota"])
    assert set(list_datasets()) >= {"digits", "imagenet", "fashion_mnist_20000"}


@pytest.mark.parametrize("name", [*NAMES, "sota"])
def test_the_papers_numbers_are_the_papers(name):
    table = load_table(name, "imagenet")
    declared = [[column.paper.get(row.name) for row in table.rows] for column in table.columns]
    assert declared == PAPER[name]


def test_rates_are_those_of_their_rows_and_are_judged_on_held_out_training_images():
    data, table = "fashion_mnist_20000", load_table("rates", "fashion_mnist_20000")
    for row in table.rows:
        cfg = read_config(row.pretrain.format(**row.values), data, row.options)
        _, epochs, rate = row.name.rsplit(", ", 2)
        assert (f"{cfg.train_cfg.max_epochs} epochs", cfg.optim_wrapper.optimizer.lr) == (epochs, float(rate))
        assert cfg.param_scheduler[1].end == cfg.train_cfg.max_epochs
        if rate == "0.006":
            build_model(cfg)
    (column,) = {(column.config.format(**column.values), column.data) for column in table.columns}
    judged, measured = (read_config(column[0], name).evaluation for name in (column[1], data))
    assert judged.train == measured.train
    assert (judged.val.dataset.data_prefix, judged.val.dataset.ann_file) == ("train", "meta/held_out.txt")


REFUSED = [
    (dict(more="del title"), "title"),
    (dict(rows="dict(name='a'), dict(name='a')"), "two rows named 'a'"),
    (dict(column=f"config={PROBE!r}, metric='m', paper=dict(c=1.0)"), "row of the paper.*'c'.*there are: a"),
    (dict(row="name='a', pretrian=3"), "row.*'pretrian'"),
    (dict(row="name='a', columns=['z']"), "column 'z'.*there are: b"),
    (dict(rows=f"dict(name='a'), dict(name='c', pretrain={PRETRAIN!r}, start='a')"), "start 'a'"),
    (dict(column=f"config={PROBE!r}"), "missing.*'metric'"),
    (dict(more="baseline = 'c'"), "baseline 'c'.*there are: a"),
    (dict(more="runner = dict(launcher='moon')"), "launcher 'moon'.*there are: local, dist, slurm"),
    (dict(more="runner = dict(gpus=8)"), "runner.*'gpus'"),
    (dict(column="config='configs/nothing.py', metric='m'"), "configs/nothing.py`, which does not exist"),
    (dict(column="config='configs/{size}.py', metric='m'"), r"no value for \{size\}"),
    (dict(row=f"name='a', pretrain={PRETRAIN!r}", column=f"config={PRETRAIN!r}, metric='m'"), "leaves 0"),
    (dict(row=f"name='a', pretrain={PRETRAIN!r}, tokenizer='configs/micro/dalle.py'"), "reads no tokens of"),
]


@pytest.mark.parametrize(("declared", "message"), REFUSED)
def test_a_wrong_declaration_is_refused_by_the_name_of_its_fault(declared, message, tmp_path):
    declare_mine(tmp_path, **declared)
    with pytest.raises(DeclarationError, match=message):
        plan_table(load_table("mine", "digits", tmp_path), [0], "out")


def test_unknown_names_are_answered_with_those_that_are_there():
    with pytest.raises(DeclarationError, match=r"table 'sota'.*there are: comparison, cutting_point"):
        load_table("sota", "digits")
    with pytest.raises(DeclarationError, match=r"dataset 'mnist'.*there are: digits, .*imagenet"):
        load_table("objectives", "mnist")
    with pytest.raises(DeclarationError, match=r"row 'DINO'.*there are: tokens alone, no pre-training, MIM"):
        TableFiller(load_table("objectives", "digits"), [0], "out").needed_runs(["MIM", "DINO"])
    with pytest.raises(DeclarationError, match="column 'knn'"):
        TableFiller(load_table("objectives", "digits"), [0], "out").needed_runs(None, ["k-NN", "knn"])
