"""torchrun without its own traceback after a tool has printed its error; used by launch.sh.

Takes torchrun's arguments. A process killed by a signal, or for lack of memory, is still reported by
torchrun. SIGUSR1 and SIGTERM are passed on to all processes, which save and end with code 75, as does this
process.
"""

import os
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from mapet_mm.utils.errors import STOPPED

if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        main()
    except SignalException as error:
        sys.exit(STOPPED if error.sigval == signal.SIGTERM else 128 + error.sigval)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        if code not in (1, STOPPED):
            raise
        sys.exit(code)
