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
from mapet_mm.evaluation.protocol import Evaluated, Protocol, build_protocols, checked
from mapet_mm.evaluation.protocols.knn import NearestNeighbours
from mapet_mm.registry import HOOKS
from mapet_mm.utils.errors import UserError


@HOOKS.register_module()
class FeatureProbeHook(KNNProbeHook):
    """Log a pre-training's k-NN on class token, patch mean and both, and other protocols, as `KNNProbeHook`.

    Args:
        *args, **kwargs: as for `KNNProbeHook`.
        protocols: others that need only pooled features, as for tools/evaluate_features.py:
            `[dict(type="LowShot", shots=[10])]`. The first process runs them, and the others wait; each holds
            all images' features (8 GB of ViT-B's on ImageNet). UserError if a training cannot run one.
    """

    def __init__(self, *args: Any, protocols: Sequence[Mapping[str, Any]] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.protocols = build_protocols(protocols)
        for protocol in self.protocols:
            if isinstance(protocol, NearestNeighbours) or protocol.needs != Protocol.needs:
                raise UserError(
                    "FeatureProbeHook's `protocols` take pooled features of `train` and `val`, and it has "
                    f"k-NN itself: leave {type(protocol).__name__} to tools/evaluate_features.py"
                )

    def figures(self, backbone: TokenBackbone, loaders: Sequence[DataLoader]) -> dict[str, float]:
        """Top-1 of each pooling, and the rows of other protocols in the first process."""
        train = take_in_memory(backbone, loaders[0], bool(self.protocols))
        val = take_in_memory(backbone, loaders[1], True)
        own = slice(get_rank(), None, get_world_size()) if self.protocols else slice(None)
        found = {f"features/k-NN, {one}": self.top1(train, val, one, own) for one in train.poolings}
        if self.protocols and is_main_process():
            banks, images = dict(train=train, val=val), {}
            for name, bank in banks.items():
                bank.values["pooled"], bank.labels = bank.values["pooled"].cpu(), bank.labels.cpu()
                images[name] = SimpleNamespace(name=name, labels=bank.labels, class_names=None)
            evaluated = Evaluated(None, banks, images, backbone.device)
            with torch.enable_grad():
                rows = checked([protocol.run(evaluated) for protocol in self.protocols])
            found |= {f"features/{row.name}": row.value for some in rows for row in some if not row.detail}
        barrier()
        return found
