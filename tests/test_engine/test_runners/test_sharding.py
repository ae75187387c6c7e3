"""The sharded strategy trains as plain data parallel does, and loads and saves whole checkpoints."""

import sys
from pathlib import Path

import pytest
import torch
from forked_processes import run_python, start_together
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from torch.distributed.tensor import DTensor
from trainings import CONFIG

from mapet_mm.engine.runners.build_runner import build_runner
from mapet_mm.engine.runners.launch import configure_training, load_config
from mapet_mm.engine.runners.sharding import FullyShardedStrategy
from mapet_mm.models import MaPeTViT
from mapet_mm.registry import MODELS
from mapet_mm.utils.dist import start_processes, stop_processes

ARCH = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32)
# Without LayerScale, as MAE's and DeiT's are: the load hook makes LayerScales of ones.
OTHER = dict(type="mmpretrain.VisionTransformer", arch=ARCH, img_size=16, patch_size=4)
OPTIONS = {
    "model.backbone.type": "mapet_mm.MaPeTViT",
    "optim_wrapper.clip_grad": dict(max_norm=0.1),
    "train_cfg.max_epochs": 3,
}
SHARDED = {"runner_type": "FlexibleRunner", "strategy": dict(type="mapet_mm.FullyShardedStrategy")}


class Record(Hook):
    """Keeps the losses of the steps, the first weights, and the share of the model that a process holds."""

    def before_train(self, runner) -> None:
        self.losses, parameters = [], list(runner.model.parameters())
        self.sharded = all(isinstance(one, DTensor) for one in parameters)
        self.weights = runner.strategy.model_state_dict() if self.sharded else {}
        held = sum(one.to_local().numel() for one in parameters) if self.sharded else 0
        self.share = held / sum(one.numel() for one in parameters)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.losses.append(outputs["loss"].item())


def train(folder: Path, name: str, resume: str | None = None, **options: object) -> None:
    cfg = load_config(str(folder / "config.py"), {**OPTIONS, **options}, str(folder / name))
    configure_training(cfg, resume, no_validate=True)
    cfg.experiment_name = name
    runner = build_runner(cfg, "pytorch")
    runner.register_hook(record := Record())
    runner.train()
    torch.save((record.losses, record.share, record.weights), folder / f"{name}_{get_rank()}.pt")


def run_process(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    start_processes("pytorch")
    train(folder, "plain")
    train(folder, "sharded", **SHARDED)
    train(folder, "resumed", **SHARDED, resume=str(folder / "sharded/epoch_2.pth"))
    train(folder, "loaded", **SHARDED, load_from=str(folder / "other.pth"))
    stop_processes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, images) -> Path:
    folder = tmp_path_factory.mktemp("sharding")
    (folder / "config.py").write_text(CONFIG.replace("DATA", str(images)))
    weights = MODELS.build(OTHER).state_dict()
    torch.save(
        {"state_dict": {f"backbone.{name}": one for name, one in weights.items()}}, folder / "other.pth"
    )
    # Forked from another interpreter: this one may have used autograd.
    run_python(__file__, folder)
    return folder


def losses(folder: Path, name: str) -> list[float]:
    """The mean over the processes, step by step."""
    both = [torch.load(folder / f"{name}_{rank}.pt")[0] for rank in (0, 1)]
    return [sum(pair) / 2 for pair in zip(*both, strict=True)]


def saved(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return torch.load(folder / name / "epoch_3.pth", weights_only=True)["state_dict"]


@pytest.mark.slow
def test_losses_and_weights_are_those_of_plain_data_parallel(folder):
    shares = [torch.load(folder / f"sharded_{rank}.pt")[1] for rank in (0, 1)]
    assert sum(shares) == 1
    assert max(shares) < 0.55
    assert len(losses(folder, "plain")) == 6
    assert losses(folder, "sharded") == pytest.approx(losses(folder, "plain"), rel=1e-5)
    plain, sharded = saved(folder, "plain"), saved(folder, "sharded")
    assert list(sharded) == list(plain)
    for name, weight in plain.items():
        # AdamW makes a step of almost any gradient, so where one is nearly nothing its rounding shows.
        torch.testing.assert_close(sharded[name], weight, rtol=0, atol=1e-4, msg=name)


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run(folder):
    assert losses(folder, "resumed") == losses(folder, "sharded")[4:]
    for name, weight in saved(folder, "sharded").items():
        assert torch.equal(saved(folder, "resumed")[name], weight), name


@pytest.mark.slow
def test_load_from_gives_the_weights_that_an_unsharded_model_has(folder):
    """The load hooks' work included: they had seen shares, and LayerScales were left at 0.1."""
    weights = torch.load(folder / "loaded_0.pt")[2]
    other = torch.load(folder / "other.pth")["state_dict"]
    vit = MaPeTViT(ARCH, 16, 4)
    vit.load_state_dict({name.removeprefix("backbone."): one for name, one in other.items()}, strict=False)
    assert any("gamma" in name for name in vit.state_dict())
    for name, weight in vit.state_dict().items():
        assert torch.equal(weights[f"backbone.{name}"], weight), name


def test_one_process_is_refused():
    with pytest.raises(ValueError, match="several processes"):
        FullyShardedStrategy()._wrap_model(torch.nn.Linear(2, 2))


if __name__ == "__main__":
    start_together(2, run_process, Path(sys.argv[1]))
