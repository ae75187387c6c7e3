"""Hide messages that libraries print on import and that no user can act on.

A tool imports this first, `import mapet_mm.utils.logging`, before anything that imports MMCV or MMPretrain.
"""

import contextlib
import importlib
import io
import logging
import warnings

from mmengine.logging import MMLogger

# MMCV may have no compiled operators; this package needs none.
warnings.filterwarnings("ignore", message="Fail to import ``MultiScaleDeformableAttention``")
warnings.filterwarnings("ignore", message="Only use 'alpha' for pillow backend")
# MMSegmentation's defaults, which its own configs keep.
warnings.filterwarnings("ignore", message="Default ``avg_non_ignore`` is False|The draw is False")
warnings.filterwarnings("ignore", message="`reduce_zero_label` will be deprecated")
NOTICES = (
    "Could not import OneDL",
    '"FileClient" will be deprecated',
    '"HardDiskBackend" is the alias',
    "Distributed training is not used, all SyncBatchNorm",
    "The prefix is not set in metric class IoUMetric",
)
LINES = 8  # longest message that is shown in a terminal


def import_quietly(name: str) -> None:
    """Import a module that prints its notices instead of logging them; its other output is passed on."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            importlib.import_module(name)
    finally:
        for line in printed.getvalue().splitlines():
            if not line.startswith(NOTICES):
                print(line)


def quieten(logger: MMLogger) -> MMLogger:
    """Write notices and long messages (environment, config, hooks) to the log file only, if there is one."""
    files = [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]
    for handler in logger.handlers:
        if files and handler not in files:
            handler.addFilter(_is_for_a_terminal)
    return logger


def _is_for_a_terminal(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    is_long = message.count("\n") >= LINES and record.levelno < logging.WARNING
    return not is_long and not message.startswith(NOTICES)


import_quietly("mmpretrain.datasets")
