"""torchrun without its own traceback after a tool has printed its error; used by launch.sh.

Takes torchrun's arguments. A process killed by a signal, or for lack of memory, is still reported by
torchrun.
"""

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

if __name__ == "__main__":
    try:
        main()
    except ChildFailedError as error:
        if error.get_first_failure()[1].exitcode != 1:
            raise
        sys.exit(1)
