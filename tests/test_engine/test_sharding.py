"""The sharded strategy trains as plain data parallel does, and its checkpoints are whole ones."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from config_building import ROOT
from imagenet_folder import write_imagenet
from mmengine.config import Config
from mmengine.dist import get_rank
from torch.distributed.tensor import DTensor

from mapet_mm.engine.launch import LaunchError, build_runner, configure_training, load_config
from mapet_mm.engine.processes import start_processes, stop_processes
from mapet_mm.engine.sharding import FullyShardedStrategy
from mapet_mm.models import MaPeTViT

RECIPE = ROOT / "configs/mapet/mapet_vit-large-p16_kclip_64xb32-amp-sharded-coslr-300e_in1k.py"
ARCH = dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=48)
EPOCHS = 3  # of one iteration


def small_recipe(folder: Path, work: str) -> Config:
    """ViT-L's recipe on one photograph, two layers wide 24, at a rate that moves the weights."""
    cfg = load_config(str(RECIPE), work_dir=str(folder / work))
    cfg.model.backbone.arch = ARCH
    cfg.model.head.embed_dims = 24
    for loader in (cfg.train_dataloader, cfg.val_dataloader):
        loader.update(batch_size=2, num_workers=0, persistent_workers=False)
        loader.dataset.data_root = str(folder)
        next(step for step in loader.dataset.pipeline if "store" in step).store = str(folder / "tokens")
    cfg.train_cfg.update(max_epochs=EPOCHS, val_interval=1)
    cfg.param_scheduler = None
    cfg.optim_wrapper.clip_grad.max_norm = 0.1
    cfg.default_hooks.checkpoint = dict(type="CheckpointHook", interval=1)
    cfg.experiment_name = work
    return cfg


def train(cfg: Config, resume: str | None = None):
    configure_training(cfg, resume)
    runner = build_runner(cfg, "pytorch")
    runner.train()
    return runner


def run_process(folder: Path) -> None:
    torch.set_num_threads(1)
    start_processes("pytorch")
    plain = small_recipe(folder, "plain")
    plain.pop("runner_type"), plain.pop("strategy")
    train(plain)
    runner = train(small_recipe(folder, "sharded"))
    runner.model.reshard()  # validation leaves some gathered
    parameters = dict(runner.model.named_parameters())
    held = sum(parameter.to_local().numel() for parameter in parameters.values())
    torch.save([held, sum(p.numel() for p in parameters.values())], folder / f"held_{get_rank()}.pt")
    assert all(isinstance(parameter, DTensor) for parameter in parameters.values())
    train(small_recipe(folder, "resumed"), resume=str(folder / "sharded" / "epoch_2.pth"))
    del runner, parameters
    stop_processes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The work dirs of three runs by two processes: plain, sharded, and sharded resumed after two epochs."""
    folder = tmp_path_factory.mktemp("sharding")
    write_imagenet(folder)
    # Not forked: a process whose autograd has threads cannot be.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command += [f"--master_port={port}", __file__, str(folder)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def read(folder: Path, work: str, epoch: int = EPOCHS) -> dict:
    return torch.load(folder / work / f"epoch_{epoch}.pth", weights_only=False)


def test_weights_are_those_of_plain_data_parallel(folder):
    """Same draws, same clipped steps of 1.5e-3, but for the order of sums (and bfloat16's rounding of it)."""
    before, plain = (read(folder, "plain", epoch)["state_dict"] for epoch in (1, 2))
    sharded = read(folder, "sharded", 2)["state_dict"]
    assert list(sharded) == list(plain)
    for name, weight in plain.items():
        torch.testing.assert_close(sharded[name], weight, rtol=0, atol=1e-5, msg=name)
    name = "backbone.layers.0.attn.qkv.weight"
    assert (plain[name] - before[name]).abs().mean() > 5e-4


def test_each_process_holds_its_share_only(folder):
    (first, whole), (second, _) = (torch.load(folder / f"held_{rank}.pt") for rank in (0, 1))
    assert first + second == whole
    assert max(first, second) < 0.52 * whole


def test_resuming_continues_the_same_run(folder):
    """Weights, moments, steps and the groups' decay come back: the third epoch is the undisturbed one's."""
    resumed, straight = read(folder, "resumed"), read(folder, "sharded")
    for name, weight in straight["state_dict"].items():
        assert torch.equal(resumed["state_dict"][name], weight), name
    assert resumed["meta"]["iter"] == EPOCHS
    decays = [
        [group["weight_decay"] for group in run["optimizer"]["param_groups"]] for run in (resumed, straight)
    ]
    assert decays[0] == decays[1]
    assert sorted(decays[0]) == [0.0, 0.05]


def test_downstream_models_take_the_checkpoint(folder):
    path = str(folder / "sharded" / "epoch_3.pth")
    init_cfg = dict(type="Pretrained", checkpoint=path, prefix="backbone.")
    vit = MaPeTViT(ARCH, 224, 16, init_cfg=init_cfg)
    vit.init_weights()
    expected = read(folder, "sharded")["state_dict"]["backbone.layers.1.ffn.layers.1.weight"]
    assert torch.equal(vit.layers[1].ffn.layers[1].weight, expected)


def test_one_process_is_refused(folder):
    with pytest.raises(LaunchError, match="FullyShardedStrategy needs several processes"):
        build_runner(small_recipe(folder, "alone"), "none")


def test_a_model_without_the_units_is_one_clear_line():
    model = MaPeTViT(ARCH, 224, 16)
    strategy = SimpleNamespace(units=("backbone.layers",))
    with pytest.raises(ValueError, match=r"strategy.units: MaPeTViT has no list of modules"):
        FullyShardedStrategy._layers(strategy, model)


def test_an_optimizer_saved_without_the_strategy_is_refused(folder):
    saved = read(folder, "plain")["optimizer"]
    with pytest.raises(ValueError, match=r"saved without FullyShardedStrategy and cannot be shared out"):
        FullyShardedStrategy.load_optim_state_dict(SimpleNamespace(optim_wrapper=None), saved)


if __name__ == "__main__":
    run_process(Path(sys.argv[1]))
