"""The sharded strategy trains as plain data parallel does, and loads and saves whole checkpoints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from config_building import ROOT
from forked_processes import start_together
from jittered_training import ARCH, build
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.runner import FlexibleRunner, Runner
from torch.distributed.tensor import DTensor

from mapet_mm.engine.runners.sharding import FullyShardedStrategy
from mapet_mm.models import MaPeTViT
from mapet_mm.registry import MODELS
from mapet_mm.utils.dist import start_processes, stop_processes

SHARDED = dict(strategy=dict(type="mapet_mm.FullyShardedStrategy"))
# A ViT without LayerScale, as MAE's and DeiT's are: the load hook makes LayerScales of ones.
WITHOUT_LAYER_SCALE = dict(type="mmpretrain.VisionTransformer", arch=ARCH, img_size=16, patch_size=4)


class Losses(Hook):
    """Keeps the losses of the steps, and how many parameters this process holds."""

    def before_train(self, runner: Runner) -> None:
        self.losses = []
        parameters = list(runner.model.parameters())
        self.sharded = all(isinstance(one, DTensor) for one in parameters)
        self.weights = runner.strategy.model_state_dict() if self.sharded else {}

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.losses.append(outputs["loss"].item())


def train(folder: Path, name: str, runner_type: type = FlexibleRunner, **options: object) -> None:
    """Train the nine steps, 2 images in each process, and write down what happened."""
    wrapper = dict(type="mapet_mm.CPUDistributedDataParallel", broadcast_buffers=False)
    optim_wrapper = dict(
        clip_grad=dict(max_norm=0.1), constructor="mapet_mm.LayerDecayOptimWrapperConstructor",
        optimizer=dict(type="AdamW", lr=1e-2, weight_decay=0.05),
    )  # fmt: skip
    runner = build(
        folder / name, batch=2, drop_path_rate=0.0, launcher="pytorch", model_wrapper_cfg=wrapper,
        optim_wrapper=optim_wrapper, runner_type=runner_type, **options,
    )  # fmt: skip
    runner.register_hook(losses := Losses())
    runner.train()
    torch.save((losses.losses, losses.sharded, losses.weights), folder / f"{name}_{get_rank()}.pt")


def run_process(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    start_processes("pytorch")
    train(folder, "plain", Runner)
    train(folder, "sharded", **SHARDED)
    train(folder, "resumed", **SHARDED, resume=True, load_from=str(folder / "sharded/iter_4.pth"))
    train(folder, "loaded", **SHARDED, load_from=str(folder / "other.pth"))
    stop_processes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The work dirs of trainings by two processes."""
    folder = tmp_path_factory.mktemp("sharding")
    model = MODELS.build(WITHOUT_LAYER_SCALE)
    torch.save(
        {"state_dict": {f"backbone.{k}": v for k, v in model.state_dict().items()}}, folder / "other.pth"
    )
    # Forked from another interpreter: this one may have used autograd.
    command = [sys.executable, "-W", "ignore", __file__, str(folder)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def results(folder: Path, name: str) -> tuple[list[float], bool, dict[str, torch.Tensor]]:
    """Losses as the mean over the processes; whether parameters were sharded; the first weights."""
    both = [torch.load(folder / f"{name}_{rank}.pt") for rank in (0, 1)]
    return [sum(pair) / 2 for pair in zip(*(one[0] for one in both), strict=True)], *both[0][1:]


def saved(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return torch.load(folder / name / "iter_9.pth", weights_only=True)["state_dict"]


@pytest.mark.slow
def test_losses_and_weights_are_those_of_plain_data_parallel(folder):
    """Same draws, same clipped and decayed steps, but for the order of sums."""
    (plain, _, _), (sharded, is_sharded, _) = results(folder, "plain"), results(folder, "sharded")
    assert is_sharded
    assert len(plain) == 9
    assert sharded == pytest.approx(plain, rel=1e-5)
    weights = saved(folder, "plain")
    assert list(saved(folder, "sharded")) == list(weights)
    for name, weight in saved(folder, "sharded").items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-4, msg=name)


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run(folder):
    """Weights, moments and schedule of step 4."""
    assert results(folder, "resumed")[0] == results(folder, "sharded")[0][4:]
    for name, weight in saved(folder, "sharded").items():
        assert torch.equal(saved(folder, "resumed")[name], weight), name


@pytest.mark.slow
def test_load_from_gives_the_weights_that_an_unsharded_model_has(folder):
    """The load hooks' work included: they had seen shares, and LayerScales were left at 0.1."""
    _, is_sharded, weights = results(folder, "loaded")
    assert is_sharded
    other = torch.load(folder / "other.pth")["state_dict"]
    for name in ("patch_embed.projection.weight", "layers.1.attn.qkv.weight"):
        assert torch.equal(weights[f"backbone.{name}"], other[f"backbone.{name}"])
    vit = MaPeTViT(ARCH, 16, 4)
    vit.load_state_dict({key.removeprefix("backbone."): one for key, one in other.items()}, strict=False)
    gammas = [name for name in vit.state_dict() if "gamma" in name]
    assert gammas
    for name in gammas:
        assert torch.equal(weights[f"backbone.{name}"], vit.state_dict()[name])


def test_one_process_is_refused():
    with pytest.raises(ValueError, match="several processes"):
        FullyShardedStrategy()._wrap_model(torch.nn.Linear(2, 2))


if __name__ == "__main__":
    start_together(2, run_process, Path(sys.argv[1]))
