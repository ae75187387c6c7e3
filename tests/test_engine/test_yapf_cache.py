"""The cache that yapf leaves at its first import: another process's unfinished one, and a damaged one."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

IMPORT = "import yapf.yapflib.yapf_api"
GUARDED = """
from mapet_mm.utils.dist import import_yapf
print("start", flush=True)
import_yapf(%s)
print("imported")
"""


def _start(code: str, cache: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def grammars(tmp_path) -> dict[Path, bytes]:
    """The files of yapf's cache and what they hold; on the disk they are cut off, as if half written."""
    assert _start(IMPORT, tmp_path).wait() == 0
    whole = {path: path.read_bytes() for path in tmp_path.rglob("*.pickle")}
    assert len(whole) == 2
    for path, content in whole.items():
        path.write_bytes(content[: len(content) // 2])
    assert _start(IMPORT, tmp_path).wait() == 1  # this is what it is about
    return whole


def test_a_cache_that_another_process_is_writing_is_waited_for(grammars, tmp_path):
    process = _start(GUARDED % 20, tmp_path)
    while process.stdout.readline() != "start\n":
        pass
    time.sleep(0.3)
    assert process.poll() is None
    for path, content in grammars.items():
        path.write_bytes(content)
    output, errors = process.communicate()
    assert (process.returncode, output) == (0, "imported\n"), errors


@pytest.mark.parametrize("left", [0, 100])
def test_a_damaged_cache_is_named(grammars, tmp_path, left):
    for path, content in grammars.items():
        path.write_bytes(content[:left])
    process = _start(GUARDED % 0.2, tmp_path)
    _, errors = process.communicate()
    assert process.returncode == 1
    last = errors.splitlines()[-1]
    assert f"the cache of yapf in {tmp_path / 'YAPF'} is damaged" in last
    assert "delete it" in last
