"""Weights are fetched by one process of all that start at once: none reads what another is still writing."""

import multiprocessing
import time
from pathlib import Path

import pytest
import torch

from mapet_mm.models.target_generators import clip_tower
from mapet_mm.models.target_generators import frozen_tokenizer as frozen

CONTENT = b"weights" * 1000


def write_slowly(path: Path) -> None:
    """As a download does: in place, in parts; a second writer at the same time would be seen."""
    path.with_suffix(".busy").touch(exist_ok=False)
    with open(path, "wb", buffering=0) as file:
        for start in range(0, len(CONTENT), 1000):
            file.write(CONTENT[start : start + 1000])
            time.sleep(0.01)
    path.with_suffix(".busy").unlink()


def fake_open_clip(cfg: dict, prefer_hf_hub: bool, cache_dir: str) -> str:
    """open_clip's: fetch unless the file is there, whole or not."""
    path = Path(cache_dir) / "RN50.pt"
    if not path.exists():
        write_slowly(path)
        (path.parent / "fetched").open("a").write("once\n")
    return str(path)


def fake_torch(address: str, file: str) -> None:
    write_slowly(Path(file))
    (Path(file).parent / "fetched").open("a").write("once\n")


def fetch(which: str, results) -> None:
    if which == "CLIP":
        file = clip_tower._download("RN50", "openai")
    else:
        file = frozen._download("https://somewhere/weights.pth?version=1")
    results.put(Path(file).read_bytes() == CONTENT)


@pytest.mark.parametrize("which", ["CLIP", "VQ-KD"])
def test_of_processes_that_start_at_once_one_fetches_the_weights(which, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr("open_clip.pretrained.download_pretrained", fake_open_clip)
    monkeypatch.setattr(torch.hub, "download_url_to_file", fake_torch)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [context.Process(target=fetch, args=(which, results)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert [results.get() for _ in processes] == [True] * 4
    (log,) = tmp_path.rglob("fetched")
    assert log.read_text() == "once\n"
