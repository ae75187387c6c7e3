"""Feature probe: log k-NN of every pooling and other protocols during a pre-training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from mmengine.dist import barrier, get_rank, get_world_size, is_main_process
from torch.utils.data import DataLoader

from mapet_mm.engine.hooks.knn_probe_hook import KNNProbeHook, take_in_memory
from mapet_mm.evaluation.adapters import TokenBackbone
from mapet_mm.evaluation.features import MemoryFeatures
from mapet_mm.registry import HOOKS
from mapet_mm.utils.errors import UserError


@HOOKS.register_module()
class FeatureProbeHook(KNNProbeHook):
    """Log a pre-training's k-NN on class token, patch mean and both, and other protocols.

    One pass of the backbone, nothing is trained. The results are the same in one process or several, sharded
    or not; the training is not affected. Averaged weights are probed as by `KNNProbeHook`.

    Args:
        train_dataloader: as for MMEngine's Runner; images with `gt_label`, each once.
        val_dataloader: images to classify.
        interval: epochs between two probes; there is always one at the end.
        protocols: other protocols that need only pooled features, as for tools/evaluate_features.py:
            `[dict(type="LowShot", shots=[10])]`. The first process runs them, and the others wait; each holds
            the last layer's features of all images (8 GB of ViT-B's on ImageNet).
        **kwargs: `k`, `temperature` and `amp`, as for `KNNProbeHook`.

    Raises:
        UserError: an unknown protocol, or one that cannot be run during a training.
    """

    def __init__(
        self,
        train_dataloader: Mapping[str, Any],
        val_dataloader: Mapping[str, Any],
        interval: int = 10,
        protocols: Sequence[Mapping[str, Any]] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(train_dataloader, val_dataloader, interval, **kwargs)
        self.protocols = _built(protocols) if protocols else []

    def figures(self, backbone: TokenBackbone, loaders: Sequence[DataLoader]) -> dict[str, float]:
        """Top-1 of each pooling, and the rows of other protocols in the first process."""
        train = take_in_memory(backbone, loaders[0], bool(self.protocols), self.amp)
        val = take_in_memory(backbone, loaders[1], True, self.amp)
        own = slice(get_rank(), None, get_world_size()) if self.protocols else slice(None)
        found = {f"features/k-NN, {one}": self.top1(train, val, one, own) for one in train.poolings}
        if self.protocols and is_main_process():
            found |= self._others(dict(train=train, val=val), backbone.device)
        barrier()
        return found

    def _others(self, banks: Mapping[str, MemoryFeatures], device: torch.device) -> dict[str, float]:
        from mapet_mm.evaluation.protocol import Evaluated, checked

        for bank in banks.values():
            bank.values["pooled"], bank.labels = bank.values["pooled"].cpu(), bank.labels.cpu()
        images = {
            name: SimpleNamespace(name=name, labels=bank.labels, class_names=None)
            for name, bank in banks.items()
        }
        evaluated = Evaluated(None, banks, images, device)
        with torch.enable_grad():
            rows = checked([protocol.run(evaluated) for protocol in self.protocols])
        return {f"features/{row.name}": row.value for some in rows for row in some if not row.detail}


def _built(configs: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Protocols that need only what the hook has, checked before a training starts."""
    from mapet_mm.evaluation.protocol import build_protocols  # scikit-learn takes its time
    from mapet_mm.evaluation.protocols.knn import NearestNeighbours

    protocols = build_protocols(configs)
    for protocol in protocols:
        needs = {(name, *kinds) for name, kinds in protocol.needs.items()}
        if isinstance(protocol, NearestNeighbours) or not needs <= {("train", "pooled"), ("val", "pooled")}:
            raise UserError(
                f"FeatureProbeHook's `protocols` take pooled features of `train` and `val`, and it has k-NN "
                f"itself: leave {type(protocol).__name__} to tools/evaluate_features.py"
            )
    return protocols
