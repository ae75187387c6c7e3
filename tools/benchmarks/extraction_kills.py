"""Disturb a tokenisation shared by several processes: kill it repeatedly, and slow one process down.

The images are the three domains of the digits, the tokenizer config is that of configs/micro. The
processes are killed with SIGKILL, first while they start, then at random moments while they write; the token
store must equal an undisturbed run's byte for byte. A second test has one process ten times slower than the
other, with a tokenizer that only waits; both together may take 15 % longer than the ideal split.
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
from multiprocessing import get_context
from pathlib import Path

import torch
from mapet_mm.datasets.digits import DigitsOptions, write_digits
from mmengine.config import Config
from torch import Tensor, nn

from mapet_mm.benchmark import machine
from mapet_mm.registry import MODELS
from mapet_mm.tokenizers import Tokenizer, TokenStore, TokenStoreError
from mapet_mm.tokenizers.extraction import extract_tokens, open_or_create
from mapet_mm.tokenizers.image_groups import GroupLoader
from mapet_mm.tokenizers.run import build_images, run_fit_codebook

ROOT = Path(__file__).parents[2]
CONFIG = "configs/micro/kclip.py"
DOMAINS = ("plain", "inverted", "rotated")
LONGEST_DELAY = 0.4
PASS_IMAGES = 8
# Share by which two processes may take longer than the ideal split of the work.
ALLOWED = 0.15


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kills", type=int, default=20, help="number of kills (default 20; 0: only the slow process)"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments")
    parser.add_argument("--slower", type=float, default=10, help="how many times slower the slow process is")
    parser.add_argument("--seconds", type=float, default=0.2, help="seconds per pass of the fast process")
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
    """Start the tokenisation in a new process group."""
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
    """Wait for the next written rows and a short delay, then kill all processes."""
    before = written(store)
    while process.poll() is None and written(store) == before:
        time.sleep(0.01)
    time.sleep(delay)
    kill(process)


def kill(process: subprocess.Popen) -> None:
    """Send SIGKILL to the process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def finish(process: subprocess.Popen) -> None:
    """Wait for an undisturbed run to end."""
    output, _ = process.communicate()
    if process.returncode:
        sys.exit(f"error: extraction failed\n{output[-2000:]}")


def files_of(store: Path) -> dict[str, bytes]:
    """Contents of all files of a store."""
    return {str(file.relative_to(store)): file.read_bytes() for file in store.rglob("*") if file.is_file()}


@MODELS.register_module()
class WaitingTokenizer(Tokenizer):
    """Takes a given number of seconds per pass, and almost no processor time."""

    vocab_size, digest, grid = 2, "waiting", (1, 1)

    def __init__(self, image_size: int, seconds: float) -> None:
        super().__init__(nn.Identity(), image_size)
        self.seconds = seconds

    def forward(self, images: Tensor) -> Tensor:
        """Token 1 for light images, else 0, (B, 1)."""
        time.sleep(self.seconds)
        return (images.flatten(1).mean(dim=1, keepdim=True) > 0).long()


def share(config: Path, store: Path, paces: list[float]) -> float:
    """Seconds until all processes that share a tokenisation have ended, each at its own pace."""
    cfg = Config.fromfile(config)
    for dataset in cfg.dataset:
        dataset.pipeline = [step for step in dataset.pipeline if step.type != "ResizeEdge"]
    images, preprocessor = build_images(cfg), MODELS.build(cfg.data_preprocessor)
    tokenizers = [WaitingTokenizer(DigitsOptions.image_size, pace) for pace in paces]
    opened = open_or_create(store, tokenizers[0], images, {})
    loader = GroupLoader(images, DigitsOptions.image_size, preprocessor, PASS_IMAGES, num_workers=1)
    works = [(tokenizer, loader, *opened) for tokenizer in tokenizers]
    fork = get_context("fork")
    processes = [fork.Process(target=extract_tokens, args=work) for work in works]
    start = time.perf_counter()
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    taken = time.perf_counter() - start
    if not TokenStore.open(store).sealed:
        sys.exit("error: the two processes have not completed their token store")
    return taken


def compare_with_ideal(config: Path, folder: Path, slower: float, seconds: float) -> bool:
    """Print the time of two processes, one of them slow; returns whether it is within the limit."""
    taken = share(config, folder / "shared", [seconds, slower * seconds])
    images = len(TokenStore.open(folder / "shared"))
    alone = images / PASS_IMAGES * seconds
    ideal = alone / (1 + 1 / slower)
    print(
        f"2 processes, {seconds:g} and {slower * seconds:g} s per {PASS_IMAGES} images, {images} images: "
        f"{taken:.1f} s; the ideal split takes {ideal:.1f} s, the fast one alone {alone:.1f} s"
    )
    print(f"{taken / ideal - 1:.1%} over the ideal split ({ALLOWED:.0%} allowed)")
    return taken <= (1 + ALLOWED) * ideal


def compare_with_undisturbed(config: Path, folder: Path, args: argparse.Namespace) -> bool:
    """Kill and resume; returns whether the token store equals an undisturbed run's."""
    moments = random.Random(args.seed)
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
    same = files_of(killed) == files_of(undisturbed)
    images = len(TokenStore.open(undisturbed))
    print(f"{images} images, {args.processes} processes, {args.kills} kills")
    print(f"images written at the kills: {', '.join(map(str, progress))}")
    print(f"final token store {'equals' if same else 'DIFFERS FROM'} the undisturbed one, byte for byte")
    return same


def main() -> None:
    """Run both tests."""
    args = parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = make_config(folder)
        print(f"{machine()}\n")
        passed = [compare_with_ideal(config, folder, args.slower, args.seconds)]
        if args.kills:
            passed.append(compare_with_undisturbed(config, folder, args))
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
