"""The sharded strategy trains as plain data parallel does, and its checkpoints are whole ones."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forked_processes import start_together
from imagenet_folder import write_imagenet
from mmengine.config import Config
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from mmengine.registry import HOOKS
from mmengine.runner import set_random_seed
from mmpretrain.registry import MODELS
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from mapet_mm.engine.hooks.resumed_recipe_hook import ResumedRecipeHook
from mapet_mm.engine.optimizers.autocast_optim_wrapper import AutocastOptimWrapper
from mapet_mm.engine.runners import sharding
from mapet_mm.engine.runners.build_runner import build_runner
from mapet_mm.engine.runners.launch import LaunchError, configure_training, load_config
from mapet_mm.engine.runners.sharding import FullyShardedStrategy
from mapet_mm.engine.runners.step_state import ForwardState
from mapet_mm.models import MaPeTViT
from mapet_mm.utils.dist import start_processes, stop_processes

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs/mapet/mapet_vit-large-p16_kclip_64xb32-amp-sharded-coslr-300e_in1k.py"
ARCH = dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=48)
EPOCHS = 3  # of one iteration
together = pytest.mark.slow  # what two processes train: half a minute on a core


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
    cfg.custom_hooks[0].alignment = False  # with probe images, which take seconds
    cfg.custom_hooks.append(dict(type="Losses"))
    return cfg


@HOOKS.register_module()
class Losses(Hook):
    """Writes the losses of the iterations down."""

    def before_train(self, runner) -> None:
        self.losses = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.losses.append(float(outputs["loss"]))

    def after_train(self, runner) -> None:
        torch.save(self.losses, Path(runner.work_dir) / f"losses_{get_rank()}.pt")


def with_probe(cfg: Config, folder: Path) -> Config:
    """One image votes for one, which is fewer than there are processes."""
    probe = dict(cfg.knn_probe, interval=2, k=1)
    for loader in (probe["train_dataloader"], probe["val_dataloader"]):
        loader.update(num_workers=0, persistent_workers=False)
        loader.dataset.data_root = str(folder)
    cfg.custom_hooks += [probe, dict(probe, type="mapet_mm.FeatureProbeHook")]
    return cfg


def gathered(cfg: Config, load: bool = False) -> dict:
    """The weights that the config's strategy starts with, read by all processes' shares."""
    configure_training(cfg)
    runner = build_runner(cfg, "pytorch")
    runner.strategy.prepare(runner.model)
    if load:
        runner.strategy.load_checkpoint(cfg.load_from, map_location="default")
    return runner.strategy.model_state_dict()


def train(cfg: Config, resume: str | None = None):
    configure_training(cfg, resume)
    runner = build_runner(cfg, "pytorch")
    runner.train()
    return runner


def run_process(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    start_processes("pytorch")
    plain = small_recipe(folder, "plain")
    plain.pop("runner_type"), plain.pop("strategy")
    train(plain)
    exact = small_recipe(folder, "sharded")
    exact.strategy.param_dtype = "float32"
    runner = train(exact)
    runner.model.reshard()  # validation leaves some gathered
    parameters = dict(runner.model.named_parameters())
    held = sum(parameter.to_local().numel() for parameter in parameters.values())
    torch.save([held, sum(p.numel() for p in parameters.values())], folder / f"held_{get_rank()}.pt")
    assert all(isinstance(parameter, DTensor) for parameter in parameters.values())
    resumed = small_recipe(folder, "resumed")
    resumed.strategy.param_dtype = "float32"
    train(resumed, resume=str(folder / "sharded" / "epoch_2.pth"))
    runner = train(with_probe(small_recipe(folder, "bfloat16"), folder))
    layer = runner.model.backbone.layers[0]
    layer.unshard()
    torch.save(layer.attn.qkv.weight.dtype, folder / f"dtype_{get_rank()}.pt")
    torch.save(gathered(small_recipe(folder, "start")), folder / f"start_{get_rank()}.pt")
    loading = small_recipe(folder, "loading")
    loading.load_from = str(folder / "plain" / "epoch_1.pth")
    torch.save(gathered(loading, load=True), folder / f"loaded_{get_rank()}.pt")
    del runner, parameters, layer
    stop_processes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The work dirs of three runs by two processes: plain, sharded, and sharded resumed after two epochs."""
    folder = tmp_path_factory.mktemp("sharding")
    write_imagenet(folder)
    # Forked from another interpreter: this one may have used autograd.
    command = [sys.executable, "-W", "ignore", __file__, str(folder)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def read(folder: Path, work: str, epoch: int = EPOCHS) -> dict:
    return torch.load(folder / work / f"epoch_{epoch}.pth", weights_only=False)


@together
def test_weights_are_those_of_plain_data_parallel(folder):
    """Same draws, same clipped steps of 1.5e-3, but for the order of sums (and bfloat16's rounding of it)."""
    before, plain = (read(folder, "plain", epoch)["state_dict"] for epoch in (1, 2))
    sharded = read(folder, "sharded", 2)["state_dict"]
    assert list(sharded) == list(plain)
    for name, weight in plain.items():
        # AdamW makes a step of almost any gradient, so where one is nearly nothing its rounding shows.
        torch.testing.assert_close(sharded[name], weight, rtol=0, atol=1e-4, msg=name)
        assert (sharded[name] - weight).abs().mean() < 2e-6, name
    name = "backbone.layers.0.attn.qkv.weight"
    assert (plain[name] - before[name]).abs().mean() > 5e-4


def losses_of(folder: Path, work: str) -> list[float]:
    """Of the iterations, the mean over the processes."""
    both = [torch.load(folder / work / f"losses_{rank}.pt") for rank in (0, 1)]
    return [sum(pair) / 2 for pair in zip(*both, strict=True)]


@together
def test_layers_gathered_in_bfloat16_give_the_losses_of_plain_autocast(folder):
    """By default with autocast, which rounds the layers' weights too, but for LayerScales."""
    assert [torch.load(folder / f"dtype_{rank}.pt") for rank in (0, 1)] == [torch.bfloat16] * 2
    plain, exact, half = (losses_of(folder, work) for work in ("plain", "sharded", "bfloat16"))
    assert len(plain) == EPOCHS
    assert abs(plain[0] - plain[2]) > 0.01  # it trains
    assert exact == pytest.approx(plain, rel=1e-5)
    assert half == pytest.approx(plain, rel=1e-5)
    weights = read(folder, "bfloat16")["state_dict"]
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    assert list(weights) == list(read(folder, "plain")["state_dict"])


@together
def test_a_probe_runs_in_the_middle_of_a_sharded_training(folder):
    """With fewer images than processes; the two splits' photograph is the same."""
    (file,) = (folder / "bfloat16").glob("*/vis_data/scalars.json")
    logged = [json.loads(line) for line in file.read_text().splitlines()]
    for name in ("knn/top1", "features/k-NN, class token", "features/k-NN, mean", "features/k-NN, both"):
        assert {record["step"]: record[name] for record in logged if name in record} == {2: 100.0, 3: 100.0}


@together
def test_a_sharded_model_starts_with_the_weights_of_an_unsharded_one(folder):
    """Those that the first process has drawn, and those of a checkpoint, bit for bit."""
    start, loaded = (torch.load(folder / f"{name}_0.pt") for name in ("start", "loaded"))
    assert [torch.load(folder / f"{name}_1.pt") for name in ("start", "loaded")] == [{}, {}]
    cfg = small_recipe(folder, "unsharded")
    set_random_seed(cfg.randomness.seed)
    model = MODELS.build(cfg.model)
    model.init_weights()
    for name, weight in model.state_dict().items():
        assert torch.equal(start[name], weight), name
    for name, weight in read(folder, "plain", 1)["state_dict"].items():
        assert torch.equal(loaded[name], weight), name


class Spied:
    """Stands for `fully_shard`: notes where the model's parameters are when a part of it is sharded."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.devices, self.policies = model, [], {}

    def __call__(self, module, mesh, mp_policy=None):
        self.devices.append({parameter.device.type for parameter in self.model.parameters()})
        self.policies[module] = mp_policy or MixedPrecisionPolicy()
        module.set_modules_to_backward_prefetch = lambda modules: None
        return module


def wrap_with_spy(monkeypatch, optim_wrapper: dict | None, **options) -> Spied:
    model = torch.nn.Module()
    model.backbone = MaPeTViT(ARCH, 32, 16)
    spied = Spied(model)
    monkeypatch.setattr(sharding, "fully_shard", spied)
    monkeypatch.setattr(sharding, "is_distributed", lambda: True)
    monkeypatch.setattr(sharding, "get_device", lambda: "meta")
    mesh = SimpleNamespace(device_type="cpu")
    monkeypatch.setattr(sharding, "init_device_mesh", lambda *_: mesh)
    monkeypatch.setattr(sharding, "choose_dtype", lambda _, name: sharding.DTYPES.get(name, torch.bfloat16))
    strategy = FullyShardedStrategy(**options)
    strategy.autocast_dtype = sharding._autocast_dtype(optim_wrapper)
    strategy._wrap_model(model)
    return spied


def test_no_device_ever_holds_the_whole_model(monkeypatch):
    """Each layer goes there to be sharded; before that, everything is in the host's memory."""
    assert wrap_with_spy(monkeypatch, None).devices == [{"cpu"}] * 3


@pytest.mark.parametrize(
    ("optim_wrapper", "options", "expected"),
    [
        (None, {}, None),
        (dict(optimizer={}), {}, None),
        (dict(type="mapet_mm.AutocastOptimWrapper"), {}, "bfloat16"),
        (dict(type=AutocastOptimWrapper), {}, "bfloat16"),
        (dict(type="AmpOptimWrapper", dtype="bfloat16"), {}, "bfloat16"),
        (dict(type="AmpOptimWrapper"), {}, None),  # float16: small gradients are not summed in it
        (dict(type="mapet_mm.AutocastOptimWrapper"), dict(param_dtype="float32"), None),
        (None, dict(param_dtype="bfloat16"), "bfloat16"),
    ],
)
def test_layers_are_gathered_in_what_they_are_computed_in(monkeypatch, optim_wrapper, options, expected):
    spied = wrap_with_spy(monkeypatch, optim_wrapper, **options)
    layers = spied.model.backbone.layers
    for module, policy in spied.policies.items():
        half = expected and module in list(layers)  # norms and what is outside the layers stay in float32
        assert policy.param_dtype == (torch.bfloat16 if half else None)
        assert policy.reduce_dtype == (torch.float32 if half else None)
    norms = [layer.ln1 for layer in layers] if expected else []
    assert set(spied.policies) >= {spied.model, *layers, *norms}


def test_an_unknown_precision_is_one_clear_line():
    with pytest.raises(ValueError, match=r"strategy.param_dtype is 'half': one of float32, bfloat16, auto"):
        FullyShardedStrategy(param_dtype="half")
    with pytest.raises(ValueError, match=r"strategy.reduce_dtype is 'auto': one of float32, bfloat16"):
        FullyShardedStrategy(reduce_dtype="auto")


@together
def test_each_process_holds_its_share_only(folder):
    (first, whole), (second, _) = (torch.load(folder / f"held_{rank}.pt") for rank in (0, 1))
    assert first + second == whole
    assert max(first, second) < 0.52 * whole


@together
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


@together
def test_downstream_models_take_the_checkpoint(folder):
    path = str(folder / "sharded" / "epoch_3.pth")
    init_cfg = dict(type="Pretrained", checkpoint=path, prefix="backbone.")
    vit = MaPeTViT(ARCH, 224, 16, init_cfg=init_cfg)
    vit.init_weights()
    expected = read(folder, "sharded")["state_dict"]["backbone.layers.1.ffn.layers.1.weight"]
    assert torch.equal(vit.layers[1].ffn.layers[1].weight, expected)


@together
def test_one_process_is_refused(folder):
    with pytest.raises(LaunchError, match="FullyShardedStrategy needs several processes"):
        build_runner(small_recipe(folder, "alone"), "none")


def test_a_model_without_the_units_is_one_clear_line():
    model = MaPeTViT(ARCH, 224, 16)
    strategy = SimpleNamespace(units=("backbone.layers",))
    with pytest.raises(ValueError, match=r"strategy.units: MaPeTViT has no list of modules"):
        FullyShardedStrategy._layers(strategy, model)


def test_an_optimizer_saved_without_the_strategy_is_refused():
    saved = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters()).state_dict()
    with pytest.raises(ValueError, match=r"saved without FullyShardedStrategy and cannot be shared out"):
        FullyShardedStrategy.load_optim_state_dict(SimpleNamespace(optim_wrapper=None), saved)


@pytest.fixture
def sharded():
    """Builds a sharded model, with an optimizer, in a process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)

    def sharded(seed: int, rate: float = 0.1) -> FullyShardedStrategy:
        torch.manual_seed(seed)
        strategy = FullyShardedStrategy(units="layers")
        model = torch.nn.Module()
        model.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(2))
        model.extract_feat = lambda images: model.layers[1](model.layers[0](images))
        strategy.model = strategy._wrap_model(model)
        strategy.optim_wrapper = OptimWrapper(torch.optim.AdamW(model.parameters(), lr=rate))
        return strategy

    yield sharded
    distributed.destroy_process_group()


def step(strategy: FullyShardedStrategy) -> torch.Tensor:
    loss = strategy.model.extract_feat(torch.ones(2, 3)).square().sum()
    strategy.optim_wrapper.update_params(loss)
    return loss.detach()


def test_a_share_is_taken_of_what_was_saved_whole(sharded):
    """Of another one's weights, also of one in DDP, and moments: the next steps are the same."""
    first, second = sharded(0), sharded(1)
    step(first)
    saved = copy.deepcopy((first.model_state_dict(), first.optim_state_dict()))  # as in a file
    assert sorted(saved[0]) == [f"layers.{i}.{name}" for i in range(2) for name in ("bias", "weight")]
    assert not any(isinstance(value, DTensor) for value in saved[0].values())
    second.load_model_state_dict({f"module.{name}": value for name, value in saved[0].items()}, strict=True)
    second.load_optim_state_dict(saved[1])
    for _ in range(2):
        assert torch.equal(step(first), step(second))


def test_a_resumed_share_has_the_rate_of_its_recipe_and_the_moments_of_its_checkpoint(sharded):
    first, second = sharded(0), sharded(0, rate=0.025)
    step(first)
    checkpoint = copy.deepcopy(dict(meta=dict(iter=1, epoch=1), optimizer=first.optim_state_dict()))
    run = SimpleNamespace(
        optim_wrapper=second.optim_wrapper,
        param_schedulers=None,
        train_dataloader=[0],
        train_loop=None,
        cfg={},
        _resume=True,
        _load_from="epoch_1.pth",
    )
    ResumedRecipeHook().after_load_checkpoint(run, checkpoint)
    second.load_optim_state_dict(checkpoint["optimizer"])
    (group,) = second.optim_wrapper.param_groups
    assert group["lr"] == 0.025
    states = [strategy.optim_wrapper.optimizer.state for strategy in (first, second)]
    for one, other in zip(*(state.values() for state in states), strict=True):
        assert torch.equal(one["exp_avg"].full_tensor(), other["exp_avg"].full_tensor())
        assert one["exp_avg"].full_tensor().any()


def test_a_sharded_parameter_without_gradient_is_put_back(sharded):
    """A device decides."""
    model = sharded(0).model.train().requires_grad_(False)
    before, weight = ForwardState(model), model.layers[0].weight.to_local()
    kept = weight.clone()
    weight.zero_()
    before.restore(torch.tensor(False))
    assert not weight.any()
    before.restore(torch.tensor(True))
    assert torch.equal(weight, kept)


def test_a_strategy_without_processes_is_one_clear_line():
    with pytest.raises(ValueError, match=r"FullyShardedStrategy needs several processes: tools/dist_train"):
        FullyShardedStrategy()._wrap_model(torch.nn.Linear(2, 2))


if __name__ == "__main__":
    start_together(2, run_process, Path(sys.argv[1]))
