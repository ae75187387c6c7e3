"""The evaluations in the middle of a pre-training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from mmengine.dist import barrier, is_main_process
from mmengine.runner import Runner
from torch import Tensor, nn

from mapet_mm.engine.hooks.knn_probe_hook import KNNProbeHook
from mapet_mm.evaluation.adapters import TokenBackbone
from mapet_mm.evaluation.features import MemoryFeatures
from mapet_mm.evaluation.image_features import (
    all_rows,
    evaluated_model,
    image_features,
    own_rows,
    undisturbed,
)
from mapet_mm.registry import HOOKS
from mapet_mm.utils.errors import UserError

if TYPE_CHECKING:
    from mapet_mm.evaluation.protocol import Protocol


@HOOKS.register_module()
class FeatureProbeHook(KNNProbeHook):
    """Log how good a pre-training's features are: k-NN on class token, patch mean and both, and more.

    Needs one pass of the backbone and trains nothing; the results are the same in one process or several,
    sharded or not. The training is not affected. Averaged weights are probed as by `KNNProbeHook`.

    Args:
        train_dataloader: as for MMEngine's Runner; images with `gt_label`, each taken once.
        val_dataloader: images to classify.
        interval: epochs between two probes; there is always one at the end.
        protocols: other protocols to run, which need only pooled features, as for tools/evaluate_features.py:
            `[dict(type="LowShot", shots=[10])]`. The first process runs them, and
            the others wait; each holds the last layer's features of all images (8 GB of ViT-B's on ImageNet).
        **kwargs: `k`, `temperature` and `amp`, as for `KNNProbeHook`.

    Raises:
        UserError: a protocol that there is not, or that cannot be run during a training.
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

    def figures(self, runner: Runner) -> dict[str, float]:
        """Top-1 of each pooling, and the rows of other protocols in the first process."""
        model = evaluated_model(runner)
        with undisturbed(model):
            loaders, sizes = self.build_loaders(runner, runner.train_dataloader.dataset)
            backbone = _PooledBackbone(model)
            train, val = (image_features(backbone, loader, amp=self.amp) for loader in loaders)
            known = [own_rows(part, sizes[0]) for part in train]
            others = [all_rows(part, sizes[1]) for part in val]
            found = {}
            for pooling, columns in backbone.columns(known[0].shape[1]).items():
                top1 = self.top1(known[0][:, columns], known[1], others[0][:, columns], others[1])
                found[f"features/k-NN, {pooling}"] = top1
            if self.protocols:
                sets = {"train": [all_rows(part, sizes[0]) for part in train], "val": others}
                found |= self._others(sets, backbone) if is_main_process() else {}
                barrier()
        return found

    def _others(self, sets: Mapping[str, Sequence[Tensor]], backbone: _PooledBackbone) -> dict[str, float]:
        from mapet_mm.evaluation.protocol import Evaluated, tell_apart

        images, features = {}, {}
        for name, (values, labels) in sets.items():
            images[name] = SimpleNamespace(name=name, labels=labels.cpu(), class_names=None)
            pooled = values.cpu().unflatten(1, (len(backbone.poolings), 1, -1)).movedim(0, 2)  # P 1 n D
            known = dict(layers=["output"], poolings=backbone.poolings, grid=backbone.tokens.grid)
            features[name] = MemoryFeatures(pooled, name=name, labels=images[name].labels, **known)
        evaluated = Evaluated(None, features, images, backbone.tokens.device)
        with torch.enable_grad():
            rows = tell_apart(self.protocols, [protocol.run(evaluated) for protocol in self.protocols])
        return {f"features/{row.name}": row.value for some in rows for row in some if not row.detail}


def _built(configs: Sequence[Mapping[str, Any]]) -> list[Protocol]:
    """Protocols that need what the hook has, checked before a training starts."""
    from mapet_mm.evaluation.protocol_choice import build_all  # scikit-learn takes its time
    from mapet_mm.evaluation.protocols.knn import NearestNeighbours

    protocols = build_all(configs)
    for protocol in protocols:
        if isinstance(protocol, NearestNeighbours):
            raise UserError(
                "FeatureProbeHook has k-NN itself: leave NearestNeighbours out of its `protocols`, and set "
                "the hook's `k` and `temperature`"
            )
        # One that asks for no features of a set works on the images and the model, which are not here.
        if any(
            each not in ("train", "val") or list(kinds) != ["pooled"]
            for each, kinds in protocol.needs.items()
        ):
            raise UserError(
                f"FeatureProbeHook's `protocols` take pooled features of `train` and `val` only; "
                f"{type(protocol).__name__} needs others: leave it to tools/evaluate_features.py"
            )
    return protocols


class _PooledBackbone(nn.Module):
    """The last layer's class token and patch mean side by side, as `image_features` asks for features.

    Args:
        model: any that `TokenBackbone` takes.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.data_preprocessor = model, model.data_preprocessor
        self.tokens = TokenBackbone(model)

    def extract_feat(self, images: Tensor) -> list[Float[Tensor, "batch width"]]:
        """`(B, D)`, or `(B, 2 D)` of both."""
        class_token, patches, grid = self.tokens(images)
        self.poolings = ["class token"] * (class_token is not None) + ["mean"] * (grid != (0, 0))
        parts = [] if class_token is None else [class_token[:, -1].float()]
        return [torch.cat([*parts, *([patches[-1].float().mean(1)] if grid != (0, 0) else [])], dim=1)]

    def columns(self, width: int) -> dict[str, slice]:
        """Where each pooling is among so many columns."""
        if len(self.poolings) == 1:
            return {self.poolings[0]: slice(None)}
        return {"class token": slice(width // 2), "mean": slice(width // 2, None), "both": slice(None)}
