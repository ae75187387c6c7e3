"""A training that was stopped anywhere and resumed ends bit for bit where an undisturbed one does."""

import random
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forked_processes import start_together
from mmengine.config import Config
from mmengine.dataset import DefaultSampler
from mmengine.hooks import Hook
from torch.utils.data import BatchSampler, DataLoader
from trainings import SEEN, JitteredNoise, StopAfter, build, final, same

from mapet_mm.datasets.samplers import draw_seed, epoch_state
from mapet_mm.engine.hooks.epoch_seed_hook import EpochSeedHook, ResumeError
from mapet_mm.registry import DATA_SAMPLERS
from mapet_mm.utils.dist import start_processes, stop_processes

DATA_SAMPLERS.register_module(module=BatchSampler)  # MMEngine 0.10.7 writes no class into a config's file
ITERATIONS = dict(train_cfg=dict(type="IterBasedTrainLoop", max_iters=9))
OPTIONS = {
    "plain": {},
    "autocast and EMA": dict(
        optim_wrapper=dict(type="mapet_mm.AutocastOptimWrapper"),
        custom_hooks=[dict(type="EMAHook", momentum=0.1)],
    ),
    "adapters, autocast and EMA": dict(
        train_backbone="lora",
        optim_wrapper=dict(type="mapet_mm.AutocastOptimWrapper"),
        custom_hooks=[dict(type="EMAHook", momentum=0.1)],
    ),
    "repeated": dict(sampler="RepeatAugSampler"),
    "accumulated": dict(optim_wrapper=dict(accumulative_counts=2)),
    "iterations": ITERATIONS,
    "iterations over epochs": dict(**ITERATIONS, sampler="DefaultSampler"),
    "iterations of a batch sampler": dict(
        **ITERATIONS, batch_sampler=dict(type="mapet_mm.BatchSampler", drop_last=False)
    ),
}


@pytest.fixture(autouse=True)
def _hurried(monkeypatch):
    """MMEngine waits for two seconds whenever a loop of iterations begins its loader again."""
    monkeypatch.setattr("mmengine.runner.loops.time", SimpleNamespace(sleep=lambda seconds: None))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Final weights of a run with these options that nothing disturbed."""

    @cache
    def weights(name: str) -> dict[str, torch.Tensor]:
        folder = tmp_path_factory.mktemp("undisturbed") / name.replace(" ", "-")
        build(folder, **OPTIONS[name]).train()
        return final(folder)

    return weights


def stop(folder: Path, after: int, **options) -> None:
    runner = build(folder, **options)
    runner.register_hook(StopAfter(after))
    with pytest.raises(KeyboardInterrupt):
        runner.train()


def stop_and_resume(folder: Path, after: int, workers: int = 0, **options) -> dict[str, torch.Tensor]:
    stop(folder, after, **options)
    torch.rand(7), np.random.rand(3)  # another state of the generators than the first process had
    build(folder, resume=True, workers=workers, **options).train()
    return final(folder)


@pytest.mark.parametrize(
    ("name", "after", "workers"),
    [
        ("plain", 3, 0),  # at the end of an epoch, before its hooks
        ("plain", 4, 1),
        ("autocast and EMA", 5, 0),
        ("adapters, autocast and EMA", 5, 0),
        ("repeated", 5, 0),
        ("accumulated", 4, 0),
        ("iterations", 5, 1),
        ("iterations over epochs", 7, 0),
        ("iterations of a batch sampler", 7, 0),
        *(
            pytest.param(name, after, after % 3 == 0, marks=pytest.mark.slow)
            for name in OPTIONS
            for after in range(1, 9)
            if name != "accumulated"
        ),
    ],
)
def test_a_run_resumed_in_the_middle_of_an_epoch_equals_an_undisturbed_one(
    name, after, workers, undisturbed, tmp_path
):
    assert same(stop_and_resume(tmp_path / "parts", after, workers, **OPTIONS[name]), undisturbed(name))


def test_steps_since_the_last_checkpoint_are_done_again_and_no_image_is_loaded_twice(undisturbed, tmp_path):
    assert same(stop_and_resume(tmp_path / "parts", 5, interval=2), undisturbed("plain"))
    SEEN.clear()
    assert same(stop_and_resume(tmp_path / "more", 2), undisturbed("plain"))
    assert len(SEEN) == 4 + 4 + 2 + 10 + 10  # two batches, then the rest


def test_a_checkpoint_whose_epochs_had_another_length_is_refused(tmp_path):
    stop(tmp_path, 4)
    with pytest.raises(ResumeError, match="3 steps, this run's have 2"):
        build(tmp_path, resume=True, batch=5).train()


class DrawSeeds(Hook):
    def before_train(self, runner) -> None:
        self.batches = []

    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
        self.batches.append([sample.draw_seed for sample in data_batch["data_samples"]])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_training_of_iterations_draws_by_seed_from_its_first_image(workers, tmp_path):
    """MMEngine 0.10.7 starts the loader with the loop, before any hook could exchange its parts."""
    runner = build(tmp_path, workers=workers, **ITERATIONS)
    runner.register_hook(seen := DrawSeeds())
    runner.train()
    places = torch.arange(9 * 4).view(9, 4).tolist()
    assert seen.batches == [[draw_seed(epoch_state(3, 0), place) for place in row] for row in places]


@pytest.mark.parametrize("options", [{}, dict(workers=1, **ITERATIONS)])
def test_a_resumed_run_without_a_seed_of_its_own_takes_the_checkpoints(options, tmp_path):
    build(tmp_path / "whole", seed=None, **options).train()
    first = torch.load(tmp_path / "whole/iter_9.pth", weights_only=False)["meta"]["seed"]
    stop(tmp_path / "parts", 4, seed=first, **options)
    build(tmp_path / "parts", resume=True, seed=None, **options).train()
    assert same(final(tmp_path / "parts"), final(tmp_path / "whole"))


@pytest.mark.parametrize("options", [{}, ITERATIONS])
def test_the_hook_seeds_wherever_a_config_lists_it(options, tmp_path):
    """In a list that an inheriting config replaces, for example, beside other hooks."""
    hooks = dict(hooks={}, custom_hooks=[dict(type="mapet_mm.EpochSeedHook")])
    stop(tmp_path / "parts", 4, **options, **hooks)
    build(tmp_path / "parts", resume=True, **options, **hooks).train()
    build(tmp_path / "whole", **options, **hooks).train()
    assert same(final(tmp_path / "parts"), final(tmp_path / "whole"))


def test_a_loader_that_is_built_already_is_refused():
    runner = SimpleNamespace(seed=1, cfg=Config(), train_dataloader=DataLoader(JitteredNoise(), 2), iter=0)
    with pytest.raises(ResumeError, match="train_dataloader"):
        EpochSeedHook().before_train(runner)


def test_steps_and_processes_draw_differently(monkeypatch):
    """Or stochastic depth would drop the same images of each process's batch."""
    hook, draws = EpochSeedHook(), []
    for hook.seed, step, rank in ((0, 0, 0), (0, 3, 0), (1, 0, 0), (0, 0, 1), (0, 0, 0)):
        monkeypatch.setattr("mapet_mm.engine.hooks.epoch_seed_hook.get_rank", lambda rank=rank: rank)
        hook.before_train_iter(SimpleNamespace(iter=step))
        draws.append((torch.rand(1).item(), np.random.rand(), random.random()))
    for of_one_generator in zip(*draws, strict=True):
        assert len(set(of_one_generator)) == 4
    assert draws[0] == draws[4]


def first_epoch(rank: int, folder: Path) -> None:
    """Write the indices and seeds that a process gets, whose own seed MMEngine made another one."""
    start_processes("pytorch")
    sampler = dict(type="DefaultSampler", shuffle=True)
    loader = DataLoader(JitteredNoise(), 2)
    loop = SimpleNamespace(dataloader=loader)
    cfg = Config(dict(train_dataloader=dict(sampler=sampler)))
    EpochSeedHook().before_train(SimpleNamespace(seed=3 + rank, cfg=cfg, train_loop=loop, iter=0))
    indices = [index for batch in loop.dataloader.batch_sampler for index in batch]
    np.save(folder / f"{rank}.npy", [(int(index), index.seed) for index in indices])
    stop_processes()


def test_processes_share_one_epoch_by_the_first_ones_seed(tmp_path):
    """Each image once: orders by different seeds would leave some out and repeat others."""
    start_together(2, first_epoch, tmp_path)
    of_first, of_second = (np.load(tmp_path / f"{rank}.npy").tolist() for rank in range(2))
    taken_in_turn = [tuple(pair) for step in zip(of_first, of_second, strict=True) for pair in step]
    order = DefaultSampler(JitteredNoise(), seed=3)
    state = epoch_state(3, 0)
    assert taken_in_turn == [(index, draw_seed(state, place)) for place, index in enumerate(order)]
