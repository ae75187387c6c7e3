"""Where things are: the repository, this building, and the folder of everything that runs write."""

from pathlib import Path

RESEARCH = Path(__file__).absolute().parents[1]
ROOT = RESEARCH.parent
TABLES = RESEARCH / "tables"
RECORDS = RESEARCH / "records.jsonl"
# Relative to the repository's root, from which tables are run.
OUT = Path("work_dirs/tables")
RUNS = OUT / "runs"


def data_file(name: str) -> str:
    """The value of MAPET_MM_DATA that selects a dataset: of the product's recipes, or of this building's.

    A recipe reads `configs/micro/_base_/data/<value>.py`; from there it is four folders up to this building.
    """
    if (RESEARCH / f"configs/data/{name}.py").is_file():
        return f"../../../../research/configs/data/{name}"
    return name
