"""The page of GPU figures keeps each part that was measured, whatever another part does."""

import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "tools/benchmarks"))
import gpu

PARTS = [
    gpu.Part("Good", "-c", "", "print('|42|')", 1),
    gpu.Part("Broken", "-c", "", "print('|7|');raise(SystemExit('no\\x20such\\x20kernel'))", 1),
    gpu.Part("Late", "-c", "", "print('|9|',flush=True);__import__('time').sleep(60)", 0.02),
    gpu.Part("Last", "-c", "", "print('|43|')", 1),
]


@pytest.fixture
def run(monkeypatch, tmp_path):
    def run(*options: str) -> tuple[int, str]:
        page = tmp_path / "pages/gpu.md"
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(page), *options])
        with pytest.raises(SystemExit) as stopped:
            gpu.main()
        return stopped.value.code, page.read_text() if page.exists() else ""

    return run


def test_a_part_that_fails_or_is_late_costs_no_other(run, monkeypatch):
    monkeypatch.setattr(gpu, "PARTS", PARTS)
    code, page = run("--small")
    assert code == 1
    titles, bodies = zip(*(section.split("\n", 1) for section in page.split("\n## ")[1:]), strict=True)
    assert titles == ("Good", "Broken", "Late", "Last")
    found = [number in body for number, body in zip(["|42|", "|7|", "|9|", "|43|"], bodies, strict=True)]
    assert found == [True] * 4
    assert "\nno such kernel\n" in bodies[1]
    assert re.search("Not complete: .*exit status 1", bodies[1])
    assert re.search("Not complete: .*timed out after 1", bodies[2])
    assert ["Not complete" in body for body in bodies] == [False, True, True, False]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(run):
    code, page = run()
    assert "no GPU was found" in code
    assert not page


@pytest.mark.slow
def test_the_whole_page_is_made_at_small_sizes(run):
    code, page = run("--small")
    assert code == 0, page
    assert page.startswith("# A trial at small sizes, whose figures say nothing\n")
    assert page.count("\n## ") == len(gpu.PARTS)
    assert page.count("| ") > 20
