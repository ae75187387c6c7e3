"""Where things are: the repository, this building, and the folder of everything that runs write."""

from pathlib import Path

from mapet_mm.utils.config import VARIABLE

RESEARCH = Path(__file__).absolute().parents[1]
ROOT = RESEARCH.parent
TABLES = RESEARCH / "tables"
RECORDS = RESEARCH / "records.jsonl"
# Relative to the repository's root, from which tables are run.
OUT = Path("work_dirs/tables")
RUNS = OUT / "runs"

SEED = "MAPET_MM_SEED"  # a dataset's file of `configs/data` may draw its tokenizer by it


def data_variables(name: str) -> dict[str, str]:
    """The environment variables that select a dataset, of the product's recipes or of this building's.

    `windows1` is `windows_of_seed.py` with seed 1, where there is no `windows1.py`. A recipe reads
    `configs/micro/_base_/data/<value>.py`; from there it is four folders up to this building.
    """
    folder = RESEARCH / "configs/data"
    seed = name[-1:]
    seeded = f"{name[:-1]}_of_seed"
    if (folder / f"{name}.py").is_file():
        return {VARIABLE: f"../../../../research/configs/data/{name}"}
    if seed.isdigit() and (folder / f"{seeded}.py").is_file():
        return {VARIABLE: f"../../../../research/configs/data/{seeded}", SEED: seed}
    return {VARIABLE: name}
