"""A project with the repository's tools and recipes and one short table: two rows of digits."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = """
from dataclasses import replace

from lab import small
from lab.tables import Column, Data, Table

few = {"train_dataloader.dataset.indices": 256}
TABLES = dict(
    short=Table(
        title="Two rows",
        dataset="digits",
        tokenizer=small.KCLIP,
        data=small.DIGITS,
        rows=[small.SCRATCH, replace(small.MAPET, options={"train_cfg.max_epochs": 8, **few})],
        columns=[
            Column("probe", "%", small.PROBE, "accuracy/top1", {"train_cfg.max_epochs": 3, **few}),
            Column("dead", "tokens", "configs/micro/token-mlp_kclip_1xb64-coslr.py", "tokens/dead"),
        ],
    )
)
"""
SNAKEMAKE = [sys.executable, "-m", "snakemake", "-s", "research/Snakefile", "--config", "table=mine/short"]


def make_project(folder: Path) -> Path:
    """The repository's recipes, tools and laboratory; data, tokens, tables and records are its own."""
    (folder / "research/tables").mkdir(parents=True)
    for name in ("tools", "configs"):
        (folder / name).symlink_to(ROOT / name)
    for path in (ROOT / "research").iterdir():
        if path.name not in ("tables", "records.jsonl", "tests"):
            (folder / "research" / path.name).symlink_to(path)
    (folder / "research/tables/mine.py").write_text(TABLE)
    (folder / "research/records.jsonl").touch()
    return folder


def snakemake(folder: Path, *words: str) -> str:
    """Run Snakemake to its end and return what it printed."""
    done = subprocess.run([*SNAKEMAKE, *words], cwd=folder, capture_output=True, text=True)
    printed = done.stdout + done.stderr
    print(f"$ snakemake {' '.join(words)}\n{printed}", flush=True)
    assert done.returncode == 0, printed[-2000:]
    return printed


def shown(folder: Path) -> tuple[str, str]:
    """The table's Markdown without dates and minutes, and its CSV."""
    markdown = (folder / "work_dirs/tables/mine/short.md").read_text().splitlines()
    kept = [line for line in markdown if not line.startswith(("- Compute", "- Shown"))]
    return "\n".join(kept), (folder / "work_dirs/tables/mine/short.csv").read_text()
