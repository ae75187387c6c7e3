"""Records: kept ones give the printed tables again, finished ones are added, both by what decided them."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import recompute
import records as command
import torch
from lab.plan import id_of, plan_table
from lab.records import (
    machine,
    make_record,
    precision_of,
    read_finished,
    read_kept,
    write_kept,
    write_record,
)
from lab.runs import Run
from lab.show import FilledTable
from lab.tables import DeclarationError, load_table
from mmengine.logging import MMLogger

from mapet_mm.engine import AutocastOptimWrapper

RESULTS = Path(__file__).parents[1] / "results"


def test_the_kept_records_give_the_printed_table():
    """A recipe that changes has other runs: measure them, undo the change, or run `records.py rekey`."""
    filled = FilledTable(load_table("fashion_mnist/objectives"), range(3), read_kept(), evaluation=2)
    assert filled.missing(filled.plan.cells) == []
    lines = filled.markdown().partition("\n| less MaPeT, 5 epochs")[0].splitlines()
    lines = [line for line in lines if line.startswith(("| ", "- Holm"))]
    assert len(lines) > 6
    assert set(lines) <= set((RESULTS / "fashion_mnist.md").read_text().splitlines())


def test_every_printed_figure_is_recomputed_from_the_records():
    pages = "\n".join(page.read_text() for page in sorted(RESULTS.glob("*.md")))
    checked = recompute.check_pages(pages)
    assert len(checked) == 2187
    assert [line for line in checked if line] == []


def test_a_wrong_cell_p_or_note_is_found():
    page = (RESULTS / "fashion_mnist.md").read_text()
    section = page[page.index("<!-- table: fashion_mnist/cutting_point") : page.index("## Tokenizers")]
    assert not any(recompute.check_pages(section))
    for right, wrong in (
        ("| 78.7 ± 1.3 |", "| 78.8 ± 1.3 |"),
        ("p 0.86", "p 0.06"),
        ("in: no cell", "in: c = 8"),
    ):
        assert section.count(right) == 1
        (line,) = filter(None, recompute.check_pages(section.replace(right, wrong)))
        assert "the records give" in line


def test_a_cost_is_that_of_all_runs_before():
    """Minutes of CLIP, codebook and tokens; both pre-trainings of a row that continues another."""
    kept = read_kept()
    filled = FilledTable(load_table("fashion_mnist/tokenizers"), [0], kept)
    minutes = filled.grid()["k-CLIP", "training, codebook, extraction (minutes)"].mean
    names = ("clip_1xb128-coslr_tokenizer", "fit_codebook_kclip", "extract_tokens_kclip")
    of_data = [one for one in kept.values() if one["data"] == "fashion_mnist_20000"]
    assert minutes == pytest.approx(sum(one["seconds"] for one in of_data if one["name"] in names) / 60)
    table = load_table("fashion_mnist/bootstrap")
    plan = plan_table(table, [0], 1)
    (key,) = {cell.run for cell in plan.cells if cell.row.startswith("generation 1, continued")}
    trainings = [run for run in plan.with_needs([key]) if run.kind == "pre-training"]
    assert len(trainings) == 2


def a_run(**entries) -> Run:
    said = dict(id="abc", name="probe", kind="evaluation", command=["tools/train.py"], outputs=[])
    return Run(**said | entries)


def test_a_record_has_the_last_values_of_the_log_without_those_of_the_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = a_run(needs=["data_digits-d1"])
    scalars = Path(run.folder, "20260101_000000/vis_data/scalars.json")
    scalars.parent.mkdir(parents=True)
    scalars.write_text(
        json.dumps({"lr": 0.1, "loss": 2.0, "iter": 9, "step": 9, "accuracy/top1": 50.0}) + "\n"
    )
    record = make_record(run, 12.34)
    assert (record["metrics"], record["seconds"], record["needs"]) == (
        {"loss": 2.0, "accuracy/top1": 50.0},
        12.3,
        ["d1"],
    )
    write_record(run, record)
    assert read_finished() == {"abc": record}


@pytest.mark.parametrize(
    ("gpu", "named"), [(None, "AVX2"), ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB")]
)
def test_a_record_names_what_computed_it(gpu, named, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu is not None)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: gpu)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    assert named in machine()


def test_the_precision_of_a_training_is_what_its_logs_say(tmp_path):
    """Of each start: a resumed training can have gone on in another one, and no table takes both."""
    said = []
    for start, dtype in (("first", None), ("second", "bfloat16"), ("elsewhere", "float32")):
        log = tmp_path / start / f"{start}.log"
        log.parent.mkdir(parents=True)
        MMLogger.get_instance(start, log_file=str(log))  # becomes the current one
        optimizer = torch.optim.SGD([torch.zeros(1)])
        if dtype:
            AutocastOptimWrapper(optimizer, dtype)
        said.append(precision_of(tmp_path))
    assert said == [None, "bfloat16", "bfloat16 and float32"]


def test_a_table_does_not_mix_precisions():
    table = load_table("cifar10/choice")
    first, second = (id_of(key) for key in list(plan_table(table, [0], 1).runs)[-2:])
    records = {first: dict(precision="bfloat16"), second: dict(precision="bfloat16")}
    FilledTable(table, [0], records, evaluation=1)
    records[second] = dict(precision="float32")
    with pytest.raises(DeclarationError, match="choice: its trainings ran in bfloat16 and in float32"):
        FilledTable(table, [0], records, evaluation=1)


def test_a_frozen_evaluations_figures_are_named_by_protocol_and_setting(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = a_run()
    Path(run.folder).mkdir(parents=True)
    rows = [
        dict(protocol="k-NN", setting="both", value=81.25),
        dict(protocol="tokens/dead", setting="", value=3.0),
    ]
    Path(run.folder, "results.json").write_text(json.dumps({"mim, epoch_16": rows}))
    assert make_record(run, 1.0)["metrics"] == {"k-NN, both": 81.25, "tokens/dead": 3.0}


def run_command(monkeypatch, action: str) -> None:
    monkeypatch.setattr(sys, "argv", ["records.py", action])
    command.main()


def test_finished_runs_are_kept_once_and_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "records.jsonl"
    monkeypatch.setattr(command, "read_kept", lambda: read_kept(kept))
    monkeypatch.setattr(command, "write_kept", lambda found: write_kept(found, kept))
    old = make_record(a_run(id="old", name="zebra", kind="data"), 1.0)
    write_kept([old], kept)
    run = a_run(kind="data")
    Path(run.folder).mkdir(parents=True)
    write_record(run, make_record(run, 2.0))
    for more in (1, 0):
        run_command(monkeypatch, "keep")
        assert f"kept {more} more records: 2 in all" in capsys.readouterr().out
    assert [json.loads(line)["id"] for line in kept.read_text().splitlines()] == ["abc", "old"]


def test_kept_records_have_the_identities_of_todays_configs(monkeypatch, tmp_path, capsys):
    """Otherwise a spelling has changed, and `rekey` finds them again, each after what it needs."""
    kept = read_kept()
    assert {record["id"] for record in command.rekeyed(kept)} == kept.keys()
    monkeypatch.setattr("lab.identity.RECIPES_VERSION", 99)
    moved = command.rekeyed(kept)
    identities = {record["id"] for record in moved}
    assert len(identities) == len(kept)
    assert not identities & kept.keys()
    assert all(set(record["needs"]) <= identities for record in moved)
    written = []
    monkeypatch.setattr(command, "write_kept", written.extend)
    run_command(monkeypatch, "rekey")
    assert len(written) == len(kept)
    assert f"{len(kept)} of {len(kept)} records have another identity" in capsys.readouterr().out


def test_one_command_writes_tables_and_draws_the_chosen_rows(tmp_path, monkeypatch, capsys):
    picture = tmp_path / "picture.svg"
    words = [
        "show.py",
        "fashion_mnist/fine_tuning",
        "--seeds",
        "3",
        "--picture",
        str(picture),
        "--rows",
        "MIM",
    ]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(RESULTS.parent / "show.py"), run_name="__main__")
    assert "<!-- MIM -->" in picture.read_text()
    assert "<!-- PIM -->" not in picture.read_text()
    assert "117 of 117 results are there" in capsys.readouterr().out
    monkeypatch.setattr("lab.show.OUT", tmp_path)
    filled = FilledTable(load_table("fashion_mnist/fine_tuning"), [0], read_kept())
    markdown, sheet = filled.write(tmp_path)
    assert "| MIM | 78.8 |" in markdown.read_text() or "| MIM | " in markdown.read_text()
    assert sheet.read_text().startswith("row,column,unit,mean,std,seeds,values,paper,missing\n")


def test_cells_say_why_they_are_empty():
    filled = FilledTable(load_table("imagenet/comparison"), [0], {})
    grid = filled.grid()
    assert grid["ViT, no pre-training", "ViT-T, linear probe (top-1, %)"] == "-"
    assert grid["MaPeT, VQ-KD", "ViT-T, linear probe (top-1, %)"] == "not run"
    key = next(cell.run for cell in filled.plan.cells if cell.row == "MaPeT, VQ-KD")
    filled.records = {key.rpartition("-")[2]: dict(metrics={"accuracy/top5": 1.0}, machine="m", seconds=60.0)}
    assert filled.grid()["MaPeT, VQ-KD", "ViT-T, fine-tuning (top-1, %)"] == "no `accuracy/top1`"
    assert "38 of 39 results are still missing" in filled.markdown()
