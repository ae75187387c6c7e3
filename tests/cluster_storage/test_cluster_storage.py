"""A token store filled over NFS by processes that are killed, on a disk that fills up: an undisturbed one.

    python -m pytest tests/cluster_storage -m slow -s        (as root: it starts an NFS server, see start.sh)

`log.txt` beside this file is what it said.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from config_building import ROOT
from dataset_converters.digits import write_digits
from mmengine.config import Config

from mapet_mm.tokenizers import TokenStore, TokenStoreError
from mapet_mm.tokenizers.run import run_extract_tokens, run_fit_codebook

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="starts an NFS server and namespaces as root"),
]
HERE = Path(__file__).parent
EXTRACT = str(ROOT / "tools" / "extract_tokens.py")
SIZE = 192
KILLS, VANISHES, FILLS, READS_ONLY = 20, 5, 10, 15
START = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - START:6.0f} s  {text}", flush=True)


class Machine:
    """A namespace in which tools are started.

    Args:
        folder: of the export and its namespaces.
        name: of the namespace.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        target = (folder / f"{name}.pid").read_text().strip()
        command = ["nsenter", "--target", target, "--net", "--mount", f"--wd={ROOT}", sys.executable]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = subprocess.Popen([*command, HERE / "workers.py", folder], env=environment, **pipes)
        while self.process.stdout.readline() != "ready\n":
            assert self.process.poll() is None

    def ask(self, *words: object) -> int:
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def run(self, *command: object) -> None:
        """Run a command of the system in the namespace."""
        target = (self.folder / f"{self.name}.pid").read_text().strip()
        subprocess.run(["nsenter", "--target", target, "--net", "--mount", *map(str, command)], check=False)


class Extraction:
    """A process that tokenises on a machine, and is started again after its end."""

    def __init__(self, machine: Machine, config: Path) -> None:
        self.machine, self.config = machine, config
        self.start()

    def start(self) -> None:
        self.pid = self.machine.ask("start", EXTRACT, self.config, "--on-error", "skip")

    def has_ended(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

    def wait(self) -> int:
        return self.machine.ask("wait", self.pid)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def said(self) -> list[str]:
        """What is no progress bar, by line."""
        folder = self.machine.folder
        lines = (folder / f"{self.pid}.txt").read_text().replace(str(folder), "FOLDER").splitlines()
        return [line for line in lines if line.startswith(("error", "tokenised", "wrote"))]


def make_config(folder: Path, images: Path, store: Path) -> Path:
    """A config that tokenises the digits into a store, at a size that takes little time."""
    cfg = Config.fromfile(ROOT / "configs" / "micro" / "kclip.py")
    cfg.tokenizer.clip_model.image_size = SIZE
    load, resize, pack = cfg.dataset[0].pipeline
    pipeline = [load, {**resize, "scale": SIZE}, pack]
    datasets = [{**dataset, "data_root": str(images), "pipeline": pipeline} for dataset in cfg.dataset]
    cfg.dataset, cfg.data_root, cfg.token_store = datasets, str(images), str(store)
    cfg.codebook.update(dataset=datasets[0], nredo=1, positions_per_image=2)
    cfg.tokenizer.codebook = str(folder / "codebook.safetensors")
    cfg.dataloader = dict(num_workers=0)
    path = folder / f"{store.name}.py"
    cfg.dump(str(path))
    return path


def files_of(store: Path) -> dict[str, bytes]:
    """All but the hidden, partial ones that killed processes leave behind."""
    files = [file for file in store.rglob("*") if file.is_file() and not file.name.startswith(".")]
    return {str(file.relative_to(store)): file.read_bytes() for file in files}


@pytest.fixture
def folder(tmp_path):
    """With the images at `nfs`, as they are without faults, and at `export`, the server's disk of 64 MB."""
    write_digits(tmp_path / "nfs")
    (tmp_path / "export").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "digits", tmp_path / "export"], check=True)
    subprocess.run(["cp", "-r", *(tmp_path / "nfs").iterdir(), tmp_path / "export"], check=True)
    yield tmp_path
    subprocess.run(["bash", HERE / "start.sh", tmp_path, "stop"], check=False)
    subprocess.run(["umount", "--lazy", tmp_path / "export"], check=False)


def test_a_store_filled_over_nfs_whatever_happens_is_an_undisturbed_one(folder):
    clean = make_config(folder, folder / "nfs", folder / "clean")
    run_fit_codebook(Config.fromfile(clean))
    run_extract_tokens(Config.fromfile(clean))
    names = list(TokenStore.open(folder / "clean").names)
    say(f"{len(names)} images tokenised by an undisturbed process, without NFS")

    broken = names[1000]
    (folder / "export" / broken).write_bytes((folder / "export" / broken).read_bytes()[:40])
    environment = {**os.environ, "PYTHON": sys.executable}
    subprocess.run(["bash", HERE / "start.sh", folder], check=True, env=environment)
    say("$ bash tests/cluster_storage/start.sh FOLDER")
    say(f"an NFS server and three network namespaces; {broken} cannot be decoded")
    store = folder / "export" / "store"
    config = make_config(folder, folder / "nfs", folder / "nfs" / "store")
    one, two, readonly = (Machine(folder, name) for name in "abc")
    extractions = [Extraction(machine, config) for machine in (one, one, two)]
    say("3 processes in 2 of the namespaces: tools/extract_tokens.py --on-error skip")
    vanished = disturb(extractions, store, one, readonly)
    codes = [extraction.wait() for extraction in extractions]
    for extraction in extractions:
        say(f"a process has ended: {extraction.said()[0]}")
    assert codes == [0, 0, 0]

    filled, undisturbed = TokenStore.open(store), TokenStore.open(folder / "clean")
    assert sorted(filled.skipped) == sorted([broken, vanished])
    kept = [name for name in names if name not in filled.skipped]
    assert all(np.array_equal(filled[name], undisturbed[name]) for name in kept)
    for name, reason in filled.skipped.items():
        say(f"skipped: {name} ({reason.replace(str(folder), 'FOLDER')})")
    say(f"the tokens of the other {len(kept)} images are those of the undisturbed process")
    again = Extraction(two, make_config(folder, folder / "nfs", folder / "again"))
    assert again.wait() == 0, again.said()
    assert files_of(store) == files_of(folder / "again")
    say("one undisturbed process that reads the same images over NFS makes the same files, byte for byte")


def disturb(extractions: list[Extraction], store: Path, machine: Machine, readonly: Machine) -> str:
    """Twenty kills and what else goes wrong; the image that has vanished."""
    moments, vanished = random.Random(0), ""
    for number in range(1, KILLS + 1):
        before = written(store)
        while written(store) == before:
            assert not all(extraction.has_ended() for extraction in extractions)
            time.sleep(0.05)
        time.sleep(moments.uniform(0, 0.5))
        if number == VANISHES:
            opened = TokenStore.open(store)
            vanished = opened.names[int(opened.missing()[-1])]
            machine.run("rm", machine.folder / "nfs" / vanished)
            say(f"{vanished} has vanished")
        if number == FILLS:
            fill_the_disk(extractions, store.parent)
        if number == READS_ONLY:
            refused = Extraction(readonly, extractions[0].config)
            assert refused.wait() == 1
            assert refused.said()[0].startswith("error: [Errno 30] Read-only file system: 'FOLDER/nfs/store")
            say(f"where the mount is read-only: {refused.said()[0]}")
        extraction = moments.choice(extractions)
        extraction.kill()
        say(f"SIGKILL {number} of {KILLS}, {written(store)} images written")
        extraction.start()
    return vanished


def fill_the_disk(extractions: list[Extraction], disk: Path) -> None:
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file:
        while not all(extraction.has_ended() for extraction in extractions):
            try:
                file.write(bytes(2**16))
            except OSError:
                time.sleep(0.01)
    assert [extraction.wait() for extraction in extractions] == [1, 1, 1]
    for extraction in extractions:
        say(f"the disk is full: {extraction.said()[0]}")
        assert extraction.said()[0].startswith("error: [Errno 28] No space left on device: 'FOLDER/nfs/store")
    filler.unlink()
    for extraction in extractions:
        extraction.start()
    say("there is space again; the three are started again")


def written(store: Path) -> int:
    """Images with tokens, seen on the server."""
    try:
        return int(TokenStore.open(store).written().sum())
    except TokenStoreError:  # not made yet
        return 0
