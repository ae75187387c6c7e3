"""torchrun without its own traceback after a tool has said what went wrong; used by launch.sh.

Takes torchrun's arguments. A process that was killed, by a signal or for its memory, is still reported as
torchrun does.
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
