"""The worker processes of data loaders: what they need from the machine, and what they do at a signal."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import threading
from collections.abc import Callable
from functools import partial
from io import BytesIO
from multiprocessing.util import get_temp_dir
from tempfile import gettempdir
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from mapet_mm.utils.dist import print_to_user
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.signals import SIGNALS

SHARED_MEMORY = "/dev/shm"
PLENTY = 2**30  # bytes; Docker gives a container 64 MB of shared memory unless told otherwise
MOST_WORKERS = 8
PREFETCH_FACTOR = 2  # batches that PyTorch lets each worker load ahead
# Linux allows a socket's path 107 bytes. multiprocessing's are TMPDIR/pymp-12345678/listener-12345678.
LONGEST_SOCKET_PATH = 107


def default_workers() -> int:
    """How many workers a loader has unless somebody says: eight, or this process's share of the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_WORKERS, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def usable_workers(num_workers: int, batch_bytes: Callable[[], int]) -> int:
    """How many workers a loader can have here; one line says so if these are fewer than asked for.

    Workers hand their batches on in shared memory, through sockets in the temporary folder.

    Args:
        num_workers: that were asked for.
        batch_bytes: gives the size of a batch's tensors; asked if there is little shared memory.

    Raises:
        UserError: the path of the temporary folder is too long for sockets.

    Examples:
        >>> usable_workers(0, batch_bytes=lambda: 10**15)
        0
    """
    if not num_workers:
        return 0
    _require_sockets()
    if not os.path.isdir(SHARED_MEMORY):
        return num_workers
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free >= PLENTY:
        return num_workers
    size = batch_bytes()
    # All processes of this machine share it. A worker loads batches ahead, and one more is in use.
    num_batches = free // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) // max(1, size)
    fitting = max(0, num_batches - 1) // PREFETCH_FACTOR
    if fitting >= num_workers:
        return num_workers
    print_to_user(
        f"{SHARED_MEMORY} has {free / 1e6:.0f} MB free, too little for batches of {size / 1e6:.1f} MB from "
        f"{num_workers} workers: {fitting} load images instead. In Docker, `--shm-size=16g` gives more"
    )
    return fitting


def _require_sockets() -> None:
    folder = gettempdir()
    if len(os.fsencode(f"{folder}/pymp-12345678/listener-12345678")) <= LONGEST_SOCKET_PATH:
        return
    # Newer Pythons take another folder then.
    if len(os.fsencode(f"{get_temp_dir()}/listener-12345678")) > LONGEST_SOCKET_PATH:
        raise UserError(
            f"TMPDIR is too long for the sockets of workers that load images ({folder}): set it to a folder "
            "with a shorter path, such as TMPDIR=/tmp, or take 0 workers"
        )


def bytes_of_batch(loader: DataLoader) -> int:
    """Bytes of the tensors in a loader's batch, as its first image tells."""
    dataset = loader.dataset
    items = dataset.__getitems__([0]) if hasattr(dataset, "__getitems__") else [dataset[0]]
    batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", 1)
    return batch_size * tensor_bytes(loader.collate_fn(items))


def tensor_bytes(batch: Any) -> int:
    """Bytes of the tensors anywhere in a batch."""
    counter = _TensorCounter(BytesIO())
    counter.dump(batch)
    return counter.num_bytes


class _TensorCounter(pickle.Pickler):
    """Pickles all but the tensors, as a worker does, and counts their bytes."""

    num_bytes = 0

    def persistent_id(self, value: object) -> str | None:
        if not isinstance(value, Tensor):
            return None
        self.num_bytes += value.nbytes
        return "tensor"


def outlive_signals(loader: DataLoader) -> DataLoader:
    """Let a loader's workers live on at `SIGNALS`, as long as their process lives; returns the loader.

    Slurm and terminals send a signal to every process. PyTorch's workers, also idle ones, would die and take
    the run with them before it saves. This is no entry of a config, and changes no seed of the workers.
    """
    if getattr(loader.worker_init_fn, "func", None) is not _start_patient_worker:
        loader.worker_init_fn = partial(_start_patient_worker, loader.worker_init_fn)
    return loader


def _start_patient_worker(start: Callable[[int], None] | None, worker: int) -> None:
    """Start a worker that takes no signal but its loader's SIGTERM."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    threading.Thread(target=_end_when_told_by, args=[os.getppid()], daemon=True).start()
    if start is not None:
        start(worker)


def _end_when_told_by(loader: int) -> None:
    """End this worker at SIGTERM of its loader's process, as PyTorch's own handler does.

    A worker whose loader is gone ends by itself: PyTorch looks every five seconds.
    """
    while True:
        received = signal.sigwaitinfo(SIGNALS)
        if received.si_signo == signal.SIGTERM and received.si_pid == loader:
            os._exit(0)
