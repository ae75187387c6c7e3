"""torchrun that passes signals on to its processes and waits for them; used by launch.sh.

Takes torchrun's arguments. Each process gets its share of the cores, unless the environment says otherwise.
At a signal, trainings save and end with code 75, as does this process; torchrun's own handlers would kill
them 30 s later, saved or not. A process killed by another's signal, or for lack of memory, is still reported
by torchrun, and a tool's own error without torchrun's words.
"""

import argparse
import logging
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import determine_local_world_size, main

from mapet_mm.utils.commands import environment_of_tools
from mapet_mm.utils.errors import STOPPED
from mapet_mm.utils.signals import SAME_SIGNAL_SECONDS, listen

KILL_SECONDS = 30  # after a further signal: what still runs hangs
received: dict[int, float] = {}  # when each signal came first


def pass_on(number: int, frame: FrameType | None) -> None:
    """Pass a signal on; a further one also makes sure that the processes end."""
    received.setdefault(number, time.monotonic())
    if time.monotonic() > min(received.values()) + SAME_SIGNAL_SECONDS:
        signal.alarm(KILL_SECONDS)
    send(number)


def send(number: int) -> None:
    """Send a signal to the processes with all that they started; without any, end by it."""
    children = Path("/proc/self/task").glob("*/children")
    leaders = [int(leader) for file in children for leader in file.read_text().split()]
    if not leaders:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    for leader in leaders:
        with suppress(ProcessLookupError):  # it has just ended
            os.killpg(leader, number)  # torchrun makes each the leader of a group


def share_cores() -> None:
    """Divide the cores among the processes; torchrun and MMEngine would give each one, with a warning."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc_per_node", "--nproc-per-node", default="1")
    known, _ = parser.parse_known_args()
    num_cores = len(os.sched_getaffinity(0))
    share = max(1, num_cores // determine_local_world_size(known.nproc_per_node))
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(share))
    os.environ.setdefault("MKL_NUM_THREADS", threads)


if __name__ == "__main__":
    share_cores()
    os.environ.update(environment_of_tools())
    listen(pass_on)
    signal.signal(signal.SIGQUIT, pass_on)
    signal.signal(signal.SIGALRM, lambda *_: send(signal.SIGKILL))
    # In another thread torchrun takes no signals, and warns of it; who failed is reported below.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        ThreadPoolExecutor(1).submit(main).result()
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        if -code in received:
            sys.exit(128 - code)  # as shells have it
        if code not in (1, STOPPED, *(128 + number for number in received)):
            raise
        sys.exit(code)
