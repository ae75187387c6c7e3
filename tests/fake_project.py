"""A project with a small table and fake tools, in which runs take no time: for the tests of tables."""

import csv
from collections.abc import Iterable
from pathlib import Path

from experiments.declaration import load_table
from experiments.fill import TableFiller
from experiments.local import LocalRunner
from experiments.plan import Run

# Its "accuracy" follows from config, seed and start, like that of a training; it notes each start, and like
# `tools/train.py --resume` it trains nothing where its last checkpoint is.
TRAIN = """
import hashlib, json, os, pathlib, runpy, sys, time
config, work_dir = sys.argv[1], pathlib.Path(sys.argv[3])
options = dict(option.split("=", 1) for option in sys.argv[6:] if "=" in option)
with open("starts.txt", "a") as starts:
    starts.write(work_dir.name + "\\n")
if options.get("fail"):
    sys.exit("this one fails")
if not (work_dir / "epoch_1.pth").exists():
    start = options.get("model.backbone.init_cfg.checkpoint")
    text = pathlib.Path(start).read_text() if start else ""
    rate = runpy.run_path(config).get("rate", 1)
    what = [pathlib.Path(config).stem, options["randomness.seed"], text, rate]
    value = int(hashlib.sha256(json.dumps(what).encode()).hexdigest()[:4], 16) / 655.36
    (work_dir / "1" / "vis_data").mkdir(parents=True, exist_ok=True)
    (work_dir / "1" / "vis_data" / "scalars.json").write_text(json.dumps({"accuracy/top1": value, "step": 1}))
    time.sleep(float(os.environ.get("FAKE_SECONDS", 0)))
    (work_dir / "epoch_1.pth").write_text(str(value))
"""
DATA_SET = """
data = dict(command=["tools/data.py"], outputs=["data.txt"])
"""
TABLE = """
_base_ = "../digits.py"
title = "A small table"
rows = [
    dict(name="scratch"),
    dict(name="one", pretrain="configs/one.py"),
    dict(name="two", pretrain="configs/two.py", options={OPTIONS}),
]
columns = [
    dict(name="probe", unit="%", config="configs/probe.py", metric="accuracy/top1", paper={"one": 50.0}),
    dict(name="tuned", unit="%", config="configs/tuned.py", metric="METRIC"),
]
"""
MODEL = 'model = dict(backbone=dict(init_cfg=dict(type="Pretrained", checkpoint="")))\n'


def write_project(folder: Path) -> None:
    for name in ("tools", "configs/tables/digits"):
        (folder / name).mkdir(parents=True)
    (folder / "tools/train.py").write_text(TRAIN)
    (folder / "tools/data.py").write_text("open('data.txt', 'w').write('data')")
    for name in ("one", "two", "probe", "tuned"):
        write_config(folder, name)
    (folder / "configs/tables/digits.py").write_text(DATA_SET)
    declare(folder)


def write_config(folder: Path, name: str, more: str = "") -> None:
    (folder / f"configs/{name}.py").write_text(f"train_cfg = dict(max_epochs=1)\n{MODEL}{more}")


def declare(folder: Path, options: str = "", metric: str = "accuracy/top1") -> None:
    text = TABLE.replace("OPTIONS", options).replace("METRIC", metric)
    (folder / "configs/tables/digits/small.py").write_text(text)


PRETRAIN = "configs/micro/mapet_vit-micro_kclip_1xb32-coslr.py"
PROBE = "configs/micro/vit-micro_1xb128-linear-coslr.py"
MEASURED = f"config={PROBE!r}, metric='m'"


def declare_mine(
    folder: Path, row: str = "name='a'", column: str = MEASURED, more: str = "", rows: str = ""
) -> None:
    """Declare a table `mine` of one row, or of `rows`, and one column."""
    (folder / "digits").mkdir(exist_ok=True)
    (folder / "digits.py").touch()
    rows = rows or f"dict({row})"
    text = f"title = 'x'\nrows = [{rows}]\ncolumns = [dict(name='b', unit='%', {column})]\n{more}"
    (folder / "digits/mine.py").write_text(text)


def filler(seeds: Iterable[int] = (0,)) -> TableFiller:
    return TableFiller(load_table("small", "digits"), seeds, "out", "the command")


def fill(seeds: Iterable[int] = (0,), rows: list[str] | None = None, tell=lambda line: None) -> TableFiller:
    one = filler(seeds)
    try:
        LocalRunner(one.needed_runs(rows), jobs=2, tell=tell, on_done=one.write).run()
    finally:
        one.write()
    return one


def starts() -> list[str]:
    """Names of the runs' folders, one for each start of a training."""
    return sorted(Path("starts.txt").read_text().split()) if Path("starts.txt").exists() else []


def named(runs: Iterable[Run]) -> list[str]:
    return sorted(Path(run.folder).name for run in runs if run.kind != "data")


def cells() -> dict[tuple[str, str], dict[str, str]]:
    """The lines of the CSV, by row and column."""
    with open("out/digits/small.csv") as file:
        return {(line["row"], line["column"]): line for line in csv.DictReader(file)}


def table() -> tuple[str, str]:
    """Markdown without the line on the time it took, and CSV."""
    markdown = Path("out/digits/small.md").read_text().splitlines()
    sheet = Path("out/digits/small.csv").read_text()
    return "\n".join(line for line in markdown if "Compute:" not in line), sheet
