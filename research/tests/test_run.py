"""One run: it starts its tool, notes its time, writes its record once, and refuses what was not planned."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from lab.records import FILE
from lab.runs import Run

RUN = Path(__file__).parents[1] / "run.py"
# Stands for a converter: it notes each start, and what it was started with.
TOOL = """
import os, sys
with open("starts.txt", "a") as file:
    file.write(f"{os.environ['OMP_NUM_THREADS']} {os.environ.get('MAPET_MM_DATA')}\\n")
if "fail" in sys.argv:
    sys.exit(3)
if "nothing" not in sys.argv:
    open("made.txt", "w").close()
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    (tmp_path / "converter.py").write_text(TOOL)
    monkeypatch.chdir(tmp_path)


def a_run(*words: str, **entries) -> Run:
    from lab.identity import identity_of
    from lab.plan import data_content

    identity = identity_of("data", data_content("converter.py"))
    said = dict(id=identity, name="data", kind="data", command=["converter.py", *words], outputs=["made.txt"])
    return Run(**said | entries)


def do(run: Run, monkeypatch, *words: str) -> dict:
    """Call run.py in this process; returns the record."""
    monkeypatch.setattr(sys, "argv", ["run.py", run.to_json(), *words])
    runpy.run_path(str(RUN), run_name="__main__")
    return json.loads(Path(run.folder, FILE).read_text())


def starts() -> list[str]:
    return Path("starts.txt").read_text().splitlines() if Path("starts.txt").exists() else []


def test_a_run_is_done_once_with_a_fixed_number_of_threads_and_has_a_record(monkeypatch):
    record = do(a_run(), monkeypatch, "--threads", "3")
    assert (record["id"], record["kind"], record["metrics"]) == (a_run().id, "data", {})
    assert do(a_run(), monkeypatch) == record
    assert starts() == ["3 None"]


def test_seconds_are_those_of_all_starts(monkeypatch):
    run = a_run()
    Path(run.folder).mkdir(parents=True)
    Path(run.folder, "seconds").write_text("500.0\n")
    assert 500 <= do(run, monkeypatch)["seconds"] < 560


REFUSED = [
    (a_run("fail"), (), "ended with code 3"),
    (a_run("nothing"), (), "did not write made.txt"),
    (a_run(id="other"), (), "was changed after this run was planned"),
    (a_run(folders=["data/imagenet"]), (), "folder data/imagenet is missing"),
    (a_run(processes=64), ("--nodes", "8"), "64 GPUs on 8 machines"),
]


@pytest.mark.parametrize(("run", "words", "noun"), REFUSED)
def test_what_cannot_be_a_result_leaves_no_record(run, words, noun, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(SystemExit, match=noun):
        do(run, monkeypatch, *words)
    assert not Path(run.folder, FILE).exists()
    assert len(starts()) == ("converter" in noun or noun.startswith(("ended", "did")))
