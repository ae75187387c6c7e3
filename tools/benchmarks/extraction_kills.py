"""Kill a tokenisation with SIGKILL, again and again; compare its token store with an undisturbed one.

The images are the three domains of the embedded digits, the tokenizer is that of configs/micro, and the work
is shared by several processes. The first kill comes while they start, the others at random moments while they
write.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mmengine.config import Config

from mapet_mm.benchmark import machine
from mapet_mm.datasets.digits import DigitsOptions, write_digits
from mapet_mm.tokenizers import TokenStore, TokenStoreError
from mapet_mm.tokenizers.from_config import run_fit_codebook

ROOT = Path(__file__).parents[2]
CONFIG = "configs/micro/kclip.py"
DOMAINS = ("plain", "inverted", "rotated")
LONGEST_DELAY = 0.4


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    return parser.parse_args()


def make_config(folder: Path) -> Path:
    """Write the images, fit a codebook, and write the config that tokenises all of them."""
    cfg = Config.fromfile(ROOT / CONFIG)
    datasets = []
    for domain in DOMAINS:
        write_digits(folder / domain, DigitsOptions(domain=domain))
        for split, dataset in zip(("train", "val"), cfg.dataset, strict=True):
            datasets.append({**dataset, "data_root": str(folder / domain), "data_prefix": split})
    cfg.dataset, cfg.data_root = datasets, str(folder)
    cfg.codebook.update(dataset=datasets[0], nredo=1)
    cfg.tokenizer.codebook = str(folder / "codebook.safetensors")
    cfg.dataloader = dict(num_workers=0)
    run_fit_codebook(cfg)
    path = folder / "tokenizer.py"
    cfg.dump(str(path))
    return path


def start(config: Path, store: Path, processes: int) -> subprocess.Popen:
    """Start the tokenisation in a process group of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={processes}", "tools/extract_tokens.py", str(config), "--out", str(store)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def written(store: Path) -> int:
    """Rows written so far."""
    with contextlib.suppress(TokenStoreError):
        return int(TokenStore.open(store).written().sum())
    return 0


def kill_while_writing(process: subprocess.Popen, store: Path, delay: float) -> None:
    """Wait for the next written rows and a moment more, then kill all processes."""
    before = written(store)
    while process.poll() is None and written(store) == before:
        time.sleep(0.01)
    time.sleep(delay)
    kill(process)


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to the whole group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def finish(process: subprocess.Popen) -> None:
    """Wait for the end of an undisturbed run."""
    output, _ = process.communicate()
    if process.returncode:
        sys.exit(f"error: extraction failed\n{output[-2000:]}")


def files_of(store: Path) -> dict[str, bytes]:
    """Content of all of a store's files."""
    return {str(file.relative_to(store)): file.read_bytes() for file in store.rglob("*") if file.is_file()}


def main() -> None:
    """Kill, resume, compare."""
    args = parse_args()
    moments = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = make_config(folder)
        killed, undisturbed = folder / "killed", folder / "undisturbed"
        progress = []
        for number in range(args.kills):
            process = start(config, killed, args.processes)
            if number == 0:
                time.sleep(moments.uniform(1, 5))
                kill(process)
            else:
                kill_while_writing(process, killed, moments.uniform(0, LONGEST_DELAY))
            progress.append(written(killed))
        finish(start(config, killed, args.processes))
        finish(start(config, undisturbed, args.processes))
        images = len(TokenStore.open(undisturbed))
        same = files_of(killed) == files_of(undisturbed)
    print(f"{images} images, {args.processes} processes, {args.kills} kills; {machine()}\n")
    print(f"images written at the kills: {', '.join(map(str, progress))}")
    print(f"final token store {'equals' if same else 'DIFFERS FROM'} the undisturbed one, byte for byte")
    sys.exit(not same)


if __name__ == "__main__":
    main()
