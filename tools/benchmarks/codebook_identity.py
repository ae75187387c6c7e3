"""Fit one codebook with several numbers of processes, workers and batch sizes; compare all bit for bit.

The features are those of configs/digits/kclip_digits.py, on the embedded digits. Every process computes with
one thread.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mapet_mm.datasets.digits import write_digits
from mapet_mm.experiments.benchmark import machine, table
from mapet_mm.tokenizers.codebook import Codebook
from mapet_mm.tokenizers.from_config import features_folder

ROOT = Path(__file__).parents[2]
CONFIG = "configs/digits/kclip_digits.py"
# Processes, workers of each, images that a worker hands over at a time.
SETTINGS = [(1, 0, 64), (1, 0, 1), (1, 4, 64), (1, 4, 1), (2, 0, 64), (2, 4, 1), (4, 0, 64), (4, 4, 1)]


def parse_args() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return parser.parse_args()


def fit(folder: Path, processes: int, workers: int, batch_size: int) -> tuple[str, str, float]:
    """Digests of the sampled features and of the codebook, and the seconds it took."""
    data, path = folder / "digits", folder / f"codebook_{processes}_{workers}_{batch_size}.safetensors"
    options = {"data_root": data, "codebook.dataset.data_root": data, "tokenizer.codebook": path}
    options |= {"dataloader.num_workers": workers, "dataloader.batch_size": batch_size}
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={processes}", "tools/fit_codebook.py", CONFIG, "--cfg-options"]
    command += [f"{key}={value}" for key, value in options.items()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)}\n{done.stderr[-2000:]}")
    seconds = time.perf_counter() - start
    sample = hashlib.sha256()
    for shard in sorted(features_folder(path).glob("*.f16")):
        sample.update(shard.read_bytes())
    return sample.hexdigest(), Codebook.load(path).digest, seconds


def main() -> None:
    """Fit with every setting, print the digests, fail if they differ."""
    parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_digits(folder / "digits")
        fitted = [fit(folder, *setting) for setting in SETTINGS]
    rows = [
        [*map(str, setting), sample[:16], codebook[:16], f"{seconds:.0f}"]
        for setting, (sample, codebook, seconds) in zip(SETTINGS, fitted, strict=True)
    ]
    print(f"{CONFIG}; {machine()}\n")
    print(table(["processes", "workers", "batch", "sample", "codebook", "seconds"], rows))
    different = len({(sample, codebook) for sample, codebook, _ in fitted})
    print(f"\n{different} different result{'s' if different > 1 else ''} in {len(SETTINGS)} settings")
    sys.exit(different > 1)


if __name__ == "__main__":
    main()
