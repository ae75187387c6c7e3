"""`mapet-mm COMMAND ...`: runs every tool, from an installed package or a clone."""

import os
import sys
from importlib import import_module

from mapet_mm.dependencies import version_report
from mapet_mm.utils.commands import PACKAGE, TOOLS, environment_of_tools, tool_command
from mapet_mm.utils.errors import one_line_errors

# Commands of several stages, each of which is a tool.
JOBS = {
    "pretrain": "a folder of images -> a pre-trained ViT, in one command",
    "finetune": "a pre-trained ViT + your labels -> a trained model, and what the pre-training was worth",
}
USAGE = """usage: mapet-mm COMMAND [arguments]     (mapet-mm COMMAND --help lists them)
       mapet-mm --version               (versions of all libraries, for a bug report)

commands:
{commands}

`mapet-mm --processes N COMMAND ...` runs a tool in N processes on this machine (torchrun), one for each GPU.
A config `configs/...` that is not in this folder is taken from the package: {package}
An error that you can fix is one line, `error: ...`; with MAPET_MM_TRACEBACK=1 it shows the traceback."""


@one_line_errors
def main(arguments: list[str] | None = None) -> None:
    """Replace this process with the command's tool; `arguments` stand for the command line's."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    processes = None
    if words[:1] == ["--processes"]:
        processes = "".join(words[1:2])
        words = words[2:]
        if not processes.isdecimal() or int(processes) < 1:
            sys.exit(f"error: --processes {processes}: how many, 1 or more?")
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        print(usage())
    elif name == "--version":
        print(version_report())
    elif name in JOBS:
        run_job = import_module(f"mapet_mm.cli.{name}").main
        run_job([*words[1:], *(["--processes", processes] if processes else [])])
    elif name in TOOLS:
        command = tool_command(name, words[1:], processes)
        os.execve(command[0], command, environment_of_tools())
    else:
        sys.exit(f"error: mapet-mm has no command {name!r}: {', '.join([*JOBS, *TOOLS])}")


def usage() -> str:
    """All commands, a line each."""
    lines = [f"  {name:20}{purpose}" for name, purpose in JOBS.items()]
    for name, (_, purpose) in TOOLS.items():
        lines.append(f"  {name:20}{purpose}")
    return USAGE.format(commands="\n".join(lines), package=PACKAGE)


if __name__ == "__main__":
    main()
