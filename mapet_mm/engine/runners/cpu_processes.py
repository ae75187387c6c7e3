"""The model in several processes without CUDA devices."""

from typing import Any

from mmengine.logging import MMLogger
from mmengine.model import MMDistributedDataParallel, revert_sync_batchnorm
from torch import nn

from mapet_mm.registry import MODEL_WRAPPERS


@MODEL_WRAPPERS.register_module()
class CPUDistributedDataParallel(MMDistributedDataParallel):
    """MMEngine's data parallel without device ids, and with BatchNorm instead of SyncBN, which needs CUDA.

    (MMEngine replaces SyncBN only in a single process.) Weights and statistics stay. Each process normalises
    with the statistics of its own images, and the log says so.

    Args:
        module: the model.
        **kwargs: as for MMEngine's `MMDistributedDataParallel`.
    """

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        count = sum(isinstance(one, nn.SyncBatchNorm) for one in module.modules())
        if count:
            module = revert_sync_batchnorm(module)
            MMLogger.get_current_instance().warning(
                f"{count} SyncBN layers need CUDA devices and are BatchNorm in this run: each process "
                "normalises with the statistics of its own images"
            )
        super().__init__(module, **{**kwargs, "device_ids": None})
