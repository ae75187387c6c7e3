"""Run tools in forks of a process that has imported everything: a fork starts in an instant.

    python workers.py FOLDER

Takes commands from standard input: `start TOOL ARGUMENTS...` answers with the process' number, `wait NUMBER`
with how it ended. What a tool says goes to FOLDER/<number>.txt.
"""

import os
import runpy
import sys
import traceback
from pathlib import Path

import mmpretrain.datasets
import mmpretrain.models  # noqa: F401

import mapet_mm.tokenizers.run  # noqa: F401


def run(folder: Path, arguments: list[str]) -> None:
    """Run a tool; never returns."""
    said = os.open(folder / f"{os.getpid()}.txt", os.O_WRONLY | os.O_CREAT)
    for stream in (0, 1, 2):
        os.dup2(said if stream else os.open(os.devnull, os.O_RDONLY), stream)
    sys.argv, code = arguments, 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
        print(ended.code)
    except BaseException:
        traceback.print_exc()
        code = 2
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Serve until standard input ends."""
    folder = Path(sys.argv[1])
    print("ready", flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "start":
            pid = os.fork()
            if pid == 0:
                run(folder, arguments)
            print(pid, flush=True)
        else:
            print(os.waitstatus_to_exitcode(os.waitpid(int(arguments[0]), 0)[1]), flush=True)


if __name__ == "__main__":
    main()
