# Short runs on a CPU: log often, write the last checkpoint only.
_base_ = "../../_base_/default_runtime.py"

default_hooks = dict(
    logger=dict(interval=10),
    checkpoint=dict(interval=-1, save_last=True),
)
