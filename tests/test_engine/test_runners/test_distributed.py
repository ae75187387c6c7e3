"""Several processes train as one does."""

import json
import socket
from functools import cache
from pathlib import Path

import pytest
import torch
from forked_processes import ROOT, run_python
from trainings import final

pytestmark = pytest.mark.slow


def train(folder: Path, processes: int, *options: str, code: int = 0) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"--nproc_per_node={processes}", f"--master_port={free.getsockname()[1]}"
    script = ROOT / "tests/distributed_training.py"
    run_python(ROOT / "tools/torchrun.py", *meeting, script, folder, *options, code=code)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Work dir of a training in so many processes, with 7 images for validation."""

    @cache
    def folder(processes: int) -> Path:
        path = tmp_path_factory.mktemp("trained") / str(processes)
        train(path, processes, "val=7")
        return path

    return folder


def said(folder: Path) -> dict:
    return json.loads((folder / "said.json").read_text())


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Sums over processes differ in their last bits."""
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=2e-5)


@pytest.mark.parametrize("processes", [2, 4])
def test_the_same_batch_in_more_processes_gives_the_same_losses_weights_and_metrics(processes, trained):
    """Validation counts each image once: 7 images are 4 + 3 and 2 + 2 + 2 + 1."""
    alone, together = said(trained(1)), said(trained(processes))
    assert len(alone["losses"]) == 9
    assert together["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    assert_close(final(trained(processes)), final(trained(1)))
    for one, other in zip(alone["metrics"], together["metrics"], strict=True):
        assert other == pytest.approx(one, abs=1e-5)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_processes_goes_on_within_the_last_bits(before, after, trained, tmp_path):
    train(tmp_path / "run", before, "until=4", code=75)
    assert torch.load(tmp_path / "run/iter_4.pth", weights_only=True)["meta"]["iter"] == 4
    train(tmp_path / "run", after, "resume=yes")
    assert_close(final(tmp_path / "run"), final(trained(1)))
