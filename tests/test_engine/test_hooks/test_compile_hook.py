"""`compile=True` compiles the backbone as one graph, by a hook."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from config_building import ROOT
from mmcv.cnn.bricks import DropPath
from mmengine.config import Config
from mmengine.logging import MMLogger
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mapet_mm.engine.hooks import compile_hook
from mapet_mm.engine.hooks.compile_hook import CompileHook
from mapet_mm.engine.runners.launch import configure_training
from mapet_mm.models import MaPeTViT


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
    loader = SimpleNamespace(batch_size=8)
    logger = MMLogger.get_instance("test")
    return SimpleNamespace(model=model, logger=logger, train_dataloader=loader, cfg=Config(), max_iters=10**5)


GRAPHS: list[torch.fx.GraphModule] = []


def noting(graph: torch.fx.GraphModule, _: object):
    """A backend that keeps each graph."""
    GRAPHS.append(graph)
    return graph.forward


def failing(graph: torch.fx.GraphModule, _: object):
    raise RuntimeError("no such kernel")


@pytest.fixture
def graphs() -> list[torch.fx.GraphModule]:
    """What is compiled from here on."""
    torch._dynamo.reset()
    GRAPHS.clear()
    return GRAPHS


def batch_of(num_images: int) -> dict:
    return dict(data_samples=[None] * num_images)


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


@pytest.mark.parametrize("chosen", [False, True, dict(mode="reduce-overhead")])
def test_what_compile_says_takes_the_place_of_a_recipes_choice(chosen):
    """And its digest is that of trainings which began before recipes had one."""
    listed = dict(compile=dict(type="mapet_mm.CompileHook", where_it_pays=True), timer=dict(type="any"))
    recipe, before = config(compile=chosen, default_hooks=listed), config(compile=chosen)
    for cfg in (recipe, before):
        configure_training(cfg)
    assert "compile" not in recipe.default_hooks
    assert "timer" in recipe.default_hooks
    digests = [cfg.default_hooks.portable_checkpoint.recipe for cfg in (recipe, before)]
    assert digests[0] == digests[1]
    kept = config(default_hooks=listed)
    configure_training(kept)
    assert kept.default_hooks.compile == listed["compile"]


def no_compiler() -> None:
    raise RuntimeError("Failed to find C compiler.")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (dict(gpu=False), "there is no GPU"),
        (dict(steps=900), "longer than it saves in 900 steps"),
        (dict(compiler=no_compiler), "RuntimeError: Failed to find C compiler"),
        (dict(parts=dict(head=Doubling())), "Module has none"),
        ({}, "is compiled in the first iterations"),
    ],
)
def test_a_recipe_is_compiled_where_it_pays_and_else_says_why_not(changed, said, graphs, monkeypatch):
    here = dict(gpu=True, steps=10**5, compiler=lambda: None, parts=dict(backbone=Doubling())) | changed
    lines, part = [], next(iter(here["parts"].values()))
    runner = runner_of(**here["parts"])
    runner.logger, runner.max_iters = SimpleNamespace(info=lines.append), here["steps"]
    hook = CompileHook(where_it_pays=True, backend=noting)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: here["gpu"])
        patch.setattr(compile_hook, "compiled_sum", here["compiler"])
        hook.before_train(runner)
    assert torch.equal(part(torch.ones(8)), torch.full((8,), 2.0))
    hook.after_train(runner)
    assert len(graphs) == (0 if changed else 1)
    assert len(lines) == 1
    assert said in lines[0]


@pytest.mark.usefixtures("graphs")
def test_a_backbone_that_the_compiler_fails_at_trains_all_the_same(monkeypatch):
    monkeypatch.setattr(compile_hook, "why_not_worthwhile", lambda *_: None)
    runner = runner_of(backbone=Doubling())
    hook = CompileHook(where_it_pays=True, backend=failing)
    hook.before_train(runner)
    assert torch.equal(runner.model.backbone(torch.ones(8)), torch.full((8,), 2.0))
    hook.after_train(runner)


def test_cuda_graphs_are_not_taken_where_batches_are_accumulated(monkeypatch):
    marked = []
    monkeypatch.setattr(CompileHook, "compile", lambda *_: None)  # Triton's, which takes a GPU
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marked.append(1))
    for count, expected in ((1, "reduce-overhead"), (4, None)):
        runner = runner_of(backbone=Doubling())
        runner.cfg = Config(dict(optim_wrapper=dict(accumulative_counts=count)))
        hook = CompileHook(mode="reduce-overhead")
        hook.before_train(runner)
        assert hook.options.get("mode") == expected
        hook.before_train_iter(runner, 0, batch_of(8))
        hook.after_train(runner)
    assert len(marked) == 1


def test_the_numbers_of_stochastic_depth_are_no_break_of_the_graph(graphs):
    """MMPretrain's layers have NumPy's: BEiT's backbone was no graph."""
    backbone = nn.Sequential(DropPath(np.float64(0.25)), nn.Linear(4, 4))
    CompileHook(backend=noting).compile(nn.ModuleDict(dict(backbone=backbone)))
    backbone(torch.ones(8, 4))
    assert len(graphs) == 1
    arch = dict(embed_dims=8, num_layers=2, num_heads=1, feedforward_channels=8)
    vit = MaPeTViT(arch, img_size=32, drop_path_rate=0.1)  # whoever compiles it
    assert {type(layer.attn.out_drop.drop_prob) for layer in vit.layers} == {float}


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


def test_validation_at_more_shapes_than_can_be_compiled_is_eager(graphs):
    """12 shapes, past PyTorch's limit of 8, twice; the training step has one graph from first to last."""
    backbone = Doubling()
    runner = runner_of(backbone=backbone)
    hook = CompileHook(backend=noting)
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


def test_a_smaller_batch_runs_eagerly_and_after_the_first_whole_one_each_other_shape(graphs):
    backbone = Doubling()
    runner = runner_of(backbone=backbone)
    hook = CompileHook(backend=noting)
    hook.before_train(runner)
    for batch in (3, 8, 8, 3, 8):  # it goes on from the last step of an epoch
        hook.before_train_iter(runner, 0, batch_of(batch))
        assert torch.equal(backbone(torch.ones(batch)), torch.full((batch,), 2.0))
        hook.after_train_iter(runner, 0, batch_of(batch))
    assert len(graphs) == 1
    backbone(torch.ones(8, 2))
    assert len(graphs) == 1, "images of another size"
    hook.before_val(runner)
    hook.after_val(runner)
    backbone(torch.ones(4))
    assert len(graphs) == 1, "validation does not end it"
    CompileHook(backend=noting).before_train(runner)
    backbone(torch.ones(5))
    assert len(graphs) == 2, "a second training begins anew, also after one that did not end"
    hook.after_train(runner)


# Graphs of each small recipe's backbone; MMPretrain's of CAE indexes patches with masks, and is cut there.
NUM_GRAPHS = {
    "mapet_vit-micro_kclip_1xb32-coslr": 1,
    "pim_vit-micro_kclip_1xb32-coslr": 1,
    "mim_vit-micro_kclip_1xb32-coslr": 1,
    "visible-mim_vit-micro_kclip_1xb32-coslr": 1,
    "beit_vit-micro_kclip_1xb32-coslr": 1,
    "cae_vit-micro_kclip_1xb32-coslr": 3,
    "vit-micro_1xb64-coslr": 1,
    "vit-micro_upernet_1xb8-poly": 1,
}


@pytest.fixture(scope="module")
def compiled_steps() -> dict[str, list]:
    """Of each recipe the number of graphs, and the losses of eager and of compiled steps."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests/compiled_steps.py"), *NUM_GRAPHS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: found for name, *found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("name", NUM_GRAPHS)
def test_compiled_steps_of_each_method_have_the_losses_of_eager_ones(name, compiled_steps):
    num_graphs, eager, compiled = compiled_steps[name]
    assert num_graphs == NUM_GRAPHS[name]
    assert len(set(eager)) == 6
    assert compiled == pytest.approx(eager, abs=1e-2)


COMPARED = """
import ast, sys, torch
from dataclasses import replace
sys.path[:0] = sys.argv[1:3]
from pretrain_throughput import VARIANTS, PretrainingStep
options = ast.literal_eval(sys.argv[3])

def losses_of(variant, count=6):
    step = PretrainingStep(variant, "tiny", 2, "cuda", num_layers=2, drop_path_rate=0.0)
    return torch.stack([step() for _ in range(count)]).cpu()

eager = losses_of(VARIANTS["eager"])
torch._dynamo.reset()
torch._dynamo.utils.counters.clear()
compiled = losses_of(replace(VARIANTS["eager"], compile=options))
print(torch._dynamo.utils.counters["stats"]["unique_graphs"], (compiled - eager).abs().max().item())
"""


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, dict(mode="reduce-overhead")])
def test_steps_on_a_gpu_have_one_graph_and_the_losses_of_eager_ones(options):
    """In a process of its own: the shape checks of the tests are no part of the graph."""
    folders = [str(ROOT), str(ROOT / "tools/benchmarks")]
    command = [sys.executable, "-W", "ignore", "-c", COMPARED, *folders, repr(options)]
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


def test_a_backbone_of_several_processes_is_cut_at_their_buckets_and_learns_the_same(graphs):
    """Of 3 MB of gradients, buckets of 1.1 MB."""
    x = torch.randn(4, 256)
    plain, model = Wrapped(), Wrapped()
    plain(x).backward()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        CompileHook(backend=noting).compile(model)
        DistributedDataParallel(model, bucket_cap_mb=1.1)(x).backward()
    finally:
        torch.distributed.destroy_process_group()
    assert len(graphs) > 1
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
