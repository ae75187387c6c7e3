"""`compile=True` compiles the backbone as one graph, by a hook."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from config_building import ROOT
from mmengine.config import Config
from mmengine.logging import MMLogger
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mapet_mm.engine.hooks.compile_hook import CompileHook
from mapet_mm.engine.runners.launch import configure_training


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Chain(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x


def runner_of(**modules: nn.Module) -> SimpleNamespace:
    model = nn.Module()
    for name, module in modules.items():
        model.add_module(name, module)
    return SimpleNamespace(model=model, logger=MMLogger.get_instance("test"))


def config(**options) -> Config:
    parts = {key: {"type": "any"} for key in ("train_dataloader", "train_cfg", "optim_wrapper")}
    return Config(dict(model=dict(type="any"), work_dir="nowhere", **parts, **options))


@pytest.mark.parametrize(
    ("compile_options", "hooks"),
    [
        (False, []),
        (True, [dict(type="mapet_mm.CompileHook")]),
        (dict(memory_budget=0.3), [dict(type="mapet_mm.CompileHook", memory_budget=0.3)]),
        (dict(mode="reduce-overhead"), [dict(type="mapet_mm.CompileHook", mode="reduce-overhead")]),
    ],
)
def test_the_configs_compile_becomes_the_hook(compile_options, hooks):
    cfg = config(compile=compile_options, custom_hooks=[dict(type="Another")])
    configure_training(cfg)
    assert "compile" not in cfg  # else MMEngine would compile the whole train step
    assert cfg.custom_hooks == [dict(type="Another"), *hooks]


def test_a_model_without_backbone_is_one_clear_line():
    with pytest.raises(ValueError, match="backbone"):
        CompileHook().before_train(runner_of(head=Doubling()))


@pytest.mark.parametrize(("budget", "expected"), [(1.0, 24), (0.5, 12)])
def test_the_compiler_keeps_no_more_than_its_budget(budget, expected):
    """A chain of 12 products and GELUs has 12 inputs to keep; GELU's, of the same size, can be made again."""
    torch._dynamo.reset()
    backbone = Chain()
    hook = CompileHook(memory_budget=budget, backend="aot_eager_decomp_partition")
    hook.compile(runner_of(backbone=backbone).model)
    result = backbone(torch.randn(64, 32))
    kept = [saved for saved in result.grad_fn.saved_tensors if saved.shape == (64, 32)]
    assert len(kept) == expected


def test_validation_at_more_shapes_than_can_be_compiled_is_eager():
    """12 shapes, past PyTorch's limit of 8, twice; the training step has one graph from first to last."""
    torch._dynamo.reset()
    graphs, backbone = [], Doubling()
    runner = runner_of(backbone=backbone)

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    hook = CompileHook(backend=backend)
    hook.before_train(runner)
    for _ in range(2):
        assert torch.equal(backbone(torch.ones(3)), torch.full((3,), 2.0))
        hook.before_val(runner)
        for side in range(4, 16):
            assert torch.equal(backbone(torch.ones(side)), torch.full((side,), 2.0))
        hook.after_val(runner)
    assert len(graphs) == 1
    assert not [name for name, _ in runner.model.named_modules() if "_orig_mod" in name]
    backbone(torch.ones(4))
    assert len(graphs) == 2, "compiled again after validation"


def test_after_the_first_step_a_smaller_last_batch_runs_eagerly():
    torch._dynamo.reset()
    graphs, backbone = [], Doubling()
    runner = runner_of(backbone=backbone)

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    hook = CompileHook(backend=backend)
    hook.before_train(runner)
    for batch in (8, 8, 3, 8):
        assert torch.equal(backbone(torch.ones(batch)), torch.full((batch,), 2.0))
        hook.after_train_iter(runner, 0)
    assert len(graphs) == 1
    hook.before_val(runner)
    hook.after_val(runner)
    backbone(torch.ones(4))
    assert len(graphs) == 1, "validation does not end it"
    CompileHook(backend=backend).before_train(runner)
    backbone(torch.ones(5))
    assert len(graphs) == 2, "a second training begins anew, also after one that did not end"
    hook.after_train(runner)


COMPARED = """
import ast, sys, torch
from dataclasses import replace
sys.path[:0] = sys.argv[1:3]
from pretrain_throughput import VARIANTS, PretrainingStep
device, options = sys.argv[3], ast.literal_eval(sys.argv[4])

def losses_of(variant, count=6):
    step = PretrainingStep(variant, "tiny", 2, device, num_layers=2, drop_path_rate=0.0)
    return torch.stack([step() for _ in range(count)]).cpu()

eager = losses_of(VARIANTS["eager"])
torch._dynamo.reset()
torch._dynamo.utils.counters.clear()
compiled = losses_of(replace(VARIANTS["eager"], compile=options))
print(torch._dynamo.utils.counters["stats"]["unique_graphs"], (compiled - eager).abs().max().item())
"""
# CUDA graphs and Triton's kernels take a GPU; the graphs themselves do not.
COMPILERS = [
    pytest.param("cpu", dict(backend="aot_eager"), marks=pytest.mark.slow),
    pytest.param("cuda", {}, marks=[pytest.mark.gpu, pytest.mark.slow]),
    pytest.param("cuda", dict(mode="reduce-overhead"), marks=[pytest.mark.gpu, pytest.mark.slow]),
]


@pytest.mark.parametrize(("device", "options"), COMPILERS)
def test_steps_of_a_recipe_have_one_graph_and_the_losses_of_eager_ones(device, options):
    """In a process of its own: the shape checks of the tests are no part of the graph."""
    folders = [str(ROOT), str(ROOT / "tools/benchmarks")]
    command = [sys.executable, "-W", "ignore", "-c", COMPARED, *folders, device, repr(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    num_graphs, difference = done.stdout.splitlines()[-1].split()
    assert int(num_graphs) == 1
    assert float(difference) < 1e-2


class Wrapped(nn.Module):
    """A model with a backbone, always with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = Chain(256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.backbone(x).square().mean()


def test_a_backbone_of_several_processes_is_cut_at_their_buckets_and_learns_the_same():
    """Of 3 MB of gradients, buckets of 1.1 MB."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    x = torch.randn(4, 256)
    plain, model = Wrapped(), Wrapped()
    plain(x).backward()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        CompileHook(backend=backend).compile(model)
        DistributedDataParallel(model, bucket_cap_mb=1.1)(x).backward()
    finally:
        torch.distributed.destroy_process_group()
    assert len(graphs) > 1
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
