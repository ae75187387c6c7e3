"""The model in several processes without CUDA devices."""

from typing import Any

from mmengine.logging import MMLogger
from mmengine.model import MMDistributedDataParallel, revert_sync_batchnorm
from torch import nn

from mapet_mm.registry import MODEL_WRAPPERS


@MODEL_WRAPPERS.register_module()
class CPUDistributedDataParallel(MMDistributedDataParallel):
    """MMEngine's data parallel without device ids, and with BatchNorm instead of SyncBN, which needs CUDA.

    Each process normalises with the statistics of its own images, and the log says so.

    Args:
        module: the model.
        **kwargs: as for MMEngine's `MMDistributedDataParallel`.
    """

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        if any(isinstance(one, nn.SyncBatchNorm) for one in module.modules()):
            module = revert_sync_batchnorm(module)
            MMLogger.get_current_instance().warning(
                "SyncBN needs CUDA devices and is BatchNorm in this run: each process normalises with the "
                "statistics of its own images"
            )
        super().__init__(module, **{**kwargs, "device_ids": None})
