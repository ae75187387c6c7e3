"""`compile=True` compiles the backbone as one graph, by a hook."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.runner import Runner
from mmpretrain.structures import DataSample
from torch import nn
from torch.utils.data import Dataset

from mapet_mm.engine.hooks.compile_hook import CompileHook
from mapet_mm.engine.runners.launch import configure_training
from mapet_mm.registry import DATASETS

ARCH = dict(embed_dims=24, num_layers=1, num_heads=3, feedforward_channels=48)


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Breaking(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum().item() > 0 else x - 1


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(12))

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
    ],
)
def test_the_configs_compile_becomes_the_hook(compile_options, hooks):
    cfg = config(compile=compile_options, custom_hooks=[dict(type="Another")])
    configure_training(cfg)
    assert "compile" not in cfg  # else MMEngine would compile the whole train step
    assert cfg.custom_hooks == [dict(type="Another"), *hooks]


def test_the_backbone_runs_compiled_and_keeps_its_names():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    backbone = Doubling()
    model = runner_of(backbone=backbone, head=Breaking())
    CompileHook(backend=backend).before_train(model)
    assert torch.equal(backbone(torch.ones(3)), torch.full((3,), 2.0))
    assert len(graphs) == 1
    assert not [name for name, _ in model.model.named_modules() if "_orig_mod" in name]


def test_a_backbone_of_several_graphs_is_refused():
    backbone = Breaking()
    model = runner_of(backbone=backbone)
    CompileHook(backend="eager").before_train(model)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        backbone(torch.ones(3))


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


@DATASETS.register_module()
class Sizes(Dataset):
    """Images of a size each, from 16 x 16 on."""

    def __init__(self, number: int, step: int) -> None:
        self.number, self.step = number, step

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict:
        torch.manual_seed(index)
        side = 16 + self.step * index
        return dict(inputs=torch.rand(3, side, side), data_samples=DataSample().set_gt_label(index % 2))


class Recorder(Hook):
    """Counts the graphs after each epoch of training and of validation."""

    priority = "LOWEST"

    def __init__(self, graphs: list) -> None:
        self.graphs, self.counts = graphs, []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.counts.append(("train", len(self.graphs)))

    def after_val(self, runner) -> None:
        self.counts.append(("val", len(self.graphs)))


def train_classifier(folder: Path, hooks: list, shapes: int = 12) -> Runner:
    loader = dict(batch_size=1, num_workers=0, collate_fn=dict(type="default_collate"))
    runner = Runner(
        model=dict(
            type="ImageClassifier",
            backbone=dict(
                type="mapet_mm.MaPeTViT", arch=ARCH, img_size=16, patch_size=4, out_type="avg_featmap"
            ),
            head=dict(type="LinearClsHead", num_classes=2, in_channels=24),
        ),
        work_dir=str(folder),
        train_dataloader=dict(
            dataset=dict(type="mapet_mm.Sizes", number=2, step=0),
            sampler=dict(type="DefaultSampler", shuffle=False),
            **loader,
        ),
        val_dataloader=dict(
            dataset=dict(type="mapet_mm.Sizes", number=shapes, step=4),
            sampler=dict(type="DefaultSampler", shuffle=False),
            **loader,
        ),
        val_evaluator=dict(type="Accuracy"),
        train_cfg=dict(by_epoch=True, max_epochs=2),
        val_cfg=dict(),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        default_hooks=dict(checkpoint=None),
        custom_hooks=hooks,
        default_scope="mmpretrain",
        randomness=dict(seed=0),
        experiment_name=str(folder),
    )
    runner.train()
    return runner


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_validation_at_more_shapes_than_can_be_compiled_leaves_training_compiled(tmp_path, backend):
    """12 shapes, past PyTorch's limit of 8, twice; the training step has one graph from first to last."""
    torch._dynamo.reset()
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    recorder = Recorder(graphs)
    compiled = train_classifier(tmp_path / "compiled", [CompileHook(backend=counted), recorder])
    assert recorder.counts == [("train", 1), ("train", 1), ("val", 1)] * 2
    plain = train_classifier(tmp_path / "plain", [])
    for one, two in zip(compiled.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0 if backend == "eager" else 1e-5)
    # What is compiled after the run is so again.
    compiled.model.train().backbone(torch.rand(3, 3, 16, 16))
    assert len(graphs) == 2
