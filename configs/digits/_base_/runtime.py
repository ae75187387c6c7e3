# Short runs on a CPU: log often, keep the last checkpoint.
_base_ = "../../_base_/default_runtime.py"

default_hooks = dict(
    logger=dict(interval=10),
    checkpoint=dict(interval=1, max_keep_ckpts=1),
)
