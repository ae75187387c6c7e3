"""The committed records give the tables of docs/results/ again."""

import shutil

import pytest
from config_building import ROOT
from experiments.declaration import load_table
from experiments.fill import TableFiller


@pytest.mark.parametrize("name", ["objectives", "fine_tuning", "transfer", "compute", "cutting_point"])
def test_the_committed_records_give_the_tables_of_the_results_page(name, repository, tmp_path):
    """A recipe that changes has other runs: its figures have to be measured again, or its change undone."""
    shutil.copytree(ROOT / "docs/records", tmp_path / "tables")
    filler = TableFiller(load_table(name, "fashion_mnist_20000"), range(3), tmp_path / "tables")
    written = filler.write()[0].read_text().partition("\n| less MaPeT, 5 epochs")[0]
    lines = [line for line in written.splitlines() if line.startswith(("| ", "- Holm"))]
    assert len(lines) > 10
    assert "| no `" not in written
    assert set(lines) <= set((ROOT / "docs/results/garments.md").read_text().splitlines())
