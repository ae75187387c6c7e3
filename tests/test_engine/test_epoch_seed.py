"""A training that was stopped anywhere and resumed ends bit for bit where an undisturbed one does."""

import pickle
import random
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from jittered_training import BATCH, EPOCHS, IMAGES, SEEN, JitteredNoise, StopAfter, build, final, same
from mmengine.dataset import Compose, DefaultSampler
from mmengine.runner import EpochBasedTrainLoop, Runner
from torch.utils.data import BatchSampler, DataLoader

from mapet_mm.datasets.samplers import SeededBatches, SeededDataset, SeededIndex, draw_seeds
from mapet_mm.engine.hooks.epoch_seed_hook import EpochSeedHook, ResumeError
from mapet_mm.models.utils.permutation import seeded_permutations

pytestmark = pytest.mark.usefixtures("one_thread")
ITERATIONS = dict(train_cfg=dict(type="IterBasedTrainLoop", max_iters=9))
OPTIONS = {
    "plain": {},
    "autocast": dict(optim_wrapper=dict(type="mapet_mm.AutocastOptimWrapper")),
    "accumulated": dict(optim_wrapper=dict(accumulative_counts=2)),
    "accumulated over epochs": dict(optim_wrapper=dict(accumulative_counts=4)),
    "EMA": dict(custom_hooks=[dict(type="EMAHook", momentum=0.1)]),
    "all at once": dict(
        optim_wrapper=dict(type="mapet_mm.AutocastOptimWrapper", accumulative_counts=4),
        custom_hooks=[dict(type="EMAHook", momentum=0.1)],
    ),
    "repeated": dict(sampler="RepeatAugSampler", optim_wrapper=dict(accumulative_counts=2)),
    "iterations": dict(**ITERATIONS, optim_wrapper=dict(accumulative_counts=2)),
    "iterations over epochs": dict(
        **ITERATIONS, sampler="DefaultSampler", optim_wrapper=dict(accumulative_counts=4)
    ),
    "iterations of a batch sampler": dict(
        **ITERATIONS,
        batch_sampler=dict(type=BatchSampler, drop_last=False),
        optim_wrapper=dict(accumulative_counts=4),
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


def stop_and_resume(folder: Path, after: int, workers: int = 0, **options) -> dict[str, torch.Tensor]:
    stopped = build(folder, **options)
    stopped.register_hook(StopAfter(after))
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    torch.rand(7), np.random.rand(3)  # another state of the generators than the first process had
    train(build(folder, resume=True, workers=workers, **options))
    return final(folder)


def train(runner: Runner) -> None:
    """Train, and end the workers now: the garbage collector would wait for them, five seconds each time."""
    runner.train()
    runner.train_dataloader._iterator = None
    runner.train_loop.__dict__.pop("dataloader_iterator", None)


@pytest.mark.parametrize(
    ("name", "after", "workers"),
    [
        ("plain", 3, 0),  # at the end of an epoch, before its hooks
        ("all at once", 5, 0),
        ("iterations", 5, 0),
        ("iterations", 5, 1),
        ("iterations over epochs", 5, 1),
        ("iterations over epochs", 7, 0),  # the gradients are of steps 4 and 5, and of 6 in the next epoch
        ("iterations of a batch sampler", 7, 0),
        *(
            pytest.param(name, after, after % 3 == 0, marks=pytest.mark.slow)
            for name in OPTIONS
            for after in range(1, 9)
        ),
    ],
)
def test_a_run_resumed_in_the_middle_of_an_epoch_equals_an_undisturbed_one(
    name, after, workers, undisturbed, tmp_path
):
    assert same(stop_and_resume(tmp_path / "parts", after, workers, **OPTIONS[name]), undisturbed(name))


class Piped(JitteredNoise):
    """The same with a pipeline, which hooks can change."""

    def __init__(self) -> None:
        super().__init__()
        self.pipeline = Compose([])

    def __getitem__(self, index: int) -> dict:
        return self.pipeline(super().__getitem__(index))


def darker(sample: dict) -> dict:
    return {**sample, "inputs": sample["inputs"] // 2}


def test_gradients_are_summed_again_with_the_recipe_that_was_switched_to(tmp_path):
    switch = dict(type="SwitchRecipeHook", schedule=[dict(action_epoch=2, train_pipeline=[darker])])
    options = dict(dataset=dict(type=Piped), custom_hooks=[switch], optim_wrapper=dict(accumulative_counts=4))
    build(tmp_path / "undisturbed", **options).train()
    assert same(stop_and_resume(tmp_path / "parts", 7, **options), final(tmp_path / "undisturbed"))


def test_steps_since_the_last_checkpoint_are_done_again_the_same(undisturbed, tmp_path):
    """Checkpoints every two steps; the run is stopped before one is due."""
    assert same(stop_and_resume(tmp_path / "parts", 5, interval=2), undisturbed("plain"))
    SEEN.clear()
    assert same(stop_and_resume(tmp_path / "more", 2), undisturbed("plain"))
    epochs = [4 + 4, 2, 10, 10]  # the first two batches once, then the rest: none twice
    assert len(SEEN) == sum(epochs)


def test_workers_change_nothing(undisturbed, tmp_path):
    train(build(tmp_path / "workers", workers=2))
    assert same(final(tmp_path / "workers"), undisturbed("plain"))
    assert same(stop_and_resume(tmp_path / "parts", 4, workers=1), undisturbed("plain"))


def test_without_the_hook_a_resumed_run_draws_otherwise(undisturbed, tmp_path):
    assert not same(stop_and_resume(tmp_path / "parts", 5, hooks={}), undisturbed("plain"))


def test_the_same_command_gives_the_same_weights_twice(undisturbed, tmp_path):
    build(tmp_path / "again").train()
    assert same(final(tmp_path / "again"), undisturbed("plain"))


def test_the_middle_of_an_epoch_of_other_length_is_refused_and_its_end_is_not(tmp_path, capture_log):
    stopped = build(tmp_path / "parts")
    stopped.register_hook(StopAfter(4))
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    with pytest.raises(ResumeError, match=r"1 steps into an epoch of 3, this run's have 2 \(1 process"):
        build(tmp_path / "parts", resume=True, batch=5).train()
    (tmp_path / "parts/last_checkpoint").write_text(str(tmp_path / "parts/iter_3.pth"))
    other = build(tmp_path / "parts", resume=True, batch=5)
    other.train()
    assert other.iter == 2 * EPOCHS


# --- what an image's draws depend on ---------------------------------------------------------------------


def epoch_of(workers: int, epoch: int, start: int = 0, batch: int = BATCH) -> dict[int, bytes]:
    """Pixels of each image of an epoch, and where it came."""
    loader = DataLoader(SeededDataset(JitteredNoise()), batch, num_workers=workers, collate_fn=list)
    batches = SeededBatches(loader.batch_sampler, 1)
    batches.epoch, batches.start = epoch, start
    object.__setattr__(loader, "batch_sampler", batches)
    samples = [sample for group in loader for sample in group]
    return {
        int(one["data_samples"].img_path): (one["inputs"].numpy().tobytes(), one["data_samples"].draw_seed)
        for one in samples
    }


def test_draws_come_from_seed_epoch_and_image():
    first = epoch_of(0, 0)
    assert epoch_of(2, 0) == first == epoch_of(0, 0, batch=3)
    other = epoch_of(0, 1)
    assert all(other[index] != first[index] for index in first)
    rest = epoch_of(0, 0, start=1)
    assert rest == {index: first[index] for index in range(4, 10)}


def test_an_epoch_follows_the_one_before():
    """Also where nobody says so: a loop that begins a loader again."""
    batches = SeededBatches([[0, 1], [2]], 1)
    seeds = [[index.seed for batch in batches for index in batch] for _ in range(3)]
    assert len({one for epoch in seeds for one in epoch}) == 9
    assert seeds[1] == draw_seeds(1, 1, np.arange(3))


def test_processes_share_one_order():
    """Images 0..7 in batches of 4 of one process, or of 2 of two: the same seeds."""
    alone = {int(i): i.seed for batch in SeededBatches([[0, 1, 2, 3], [4, 5, 6, 7]], 5) for i in batch}
    shared = {}
    for rank in range(2):
        batches = SeededBatches([[rank, rank + 2], [rank + 4, rank + 6]], 5)
        batches.rank, batches.world_size = rank, 2
        shared |= {int(i): i.seed for batch in batches for i in batch}
    assert shared == alone


def test_copies_of_an_image_differ():
    (batch,) = SeededBatches([[3, 3, 3]], 1)
    assert len({index.seed for index in batch}) == 3


def test_wrappers_survive_other_start_methods_and_pass_attributes_on():
    dataset = JitteredNoise()
    dataset.pipeline = "old"
    wrapped = pickle.loads(pickle.dumps(SeededDataset(dataset)))
    assert wrapped.pipeline == "old"
    wrapped.pipeline = "new"
    assert wrapped.dataset.pipeline == "new"
    assert not hasattr(wrapped, "metainfo")
    (batch,) = SeededBatches([[7]], 1)
    again = pickle.loads(pickle.dumps(batch))[0]
    assert (again, again.seed) == (7, batch[0].seed)
    assert isinstance(wrapped[5]["inputs"], torch.Tensor)  # without a seed: as it is
    shared = pickle.loads(pickle.dumps(SeededBatches([[7]], 1)))
    assert shared.batches == [[7]]
    assert SeededDataset([torch.ones(2)])[SeededIndex(0, 5)].tolist() == [
        1,
        1,
    ]  # no sample that notes its seed


def run_of(loader: DataLoader, **config) -> SimpleNamespace:
    loop = EpochBasedTrainLoop.__new__(EpochBasedTrainLoop)
    return SimpleNamespace(
        seed=1, train_dataloader=loader, iter=0, epoch=0, train_loop=loop, optim_wrapper=None, cfg=config
    )


@pytest.mark.parametrize("own", [7, None])
def test_a_seed_of_the_sampler_alone_orders_the_images(own):
    """Before: the run's seed did, so that runs with other orders had the same."""
    sampler = dict(type="DefaultSampler", shuffle=True) | ({} if own is None else {"seed": own})
    config = dict(dataset=JitteredNoise(), batch_size=BATCH, sampler=sampler)
    loader = Runner.build_dataloader(config, seed=5)
    hook, run = EpochSeedHook(), run_of(loader, train_dataloader=config)
    hook.before_train(run)
    hook.before_train_epoch(run)
    order = [int(sample.img_path) for batch in loader for sample in batch["data_samples"]]
    assert order == list(DefaultSampler(range(IMAGES), seed=own or run.seed))


def test_a_sampler_without_seed_and_epochs_is_seeded_as_well():
    """PyTorch's own, in order."""
    loader = DataLoader(JitteredNoise(), BATCH, collate_fn=list)
    hook, run = EpochSeedHook(), run_of(loader)
    hook.before_train(run)
    hook.before_train_epoch(run)
    samples = [sample for group in loader for sample in group]
    found = {
        int(one["data_samples"].img_path): (one["inputs"].numpy().tobytes(), one["data_samples"].draw_seed)
        for one in samples
    }
    assert found == epoch_of(0, 0)


def test_a_set_that_makes_its_own_batches_is_said_not_to_be_seeded(capture_log):
    loader = DataLoader(JitteredNoise(), batch_size=None)
    hook, run = EpochSeedHook(), run_of(loader)
    hook.before_train(run)
    hook.before_train_epoch(run)
    assert "whose draws it cannot seed: a resumed run will differ" in capture_log()
    assert isinstance(loader.dataset, JitteredNoise)


def test_permutations_depend_on_their_seed_alone():
    seeds = torch.tensor(draw_seeds(0, 0, np.arange(2000)))
    permutations = seeded_permutations(seeds, 10)
    assert torch.equal(permutations[:, 0], torch.zeros(2000, dtype=torch.int64))
    assert torch.equal(permutations.sort(1).values, torch.arange(10).expand(2000, -1))
    behind_registers = seeded_permutations(seeds, 13, num_extra_tokens=4)
    assert torch.equal(behind_registers[:, :4], torch.arange(4).expand(len(seeds), 4))
    assert torch.equal(behind_registers[:, 4:], permutations[:, 1:] + 3)
    assert torch.equal(seeded_permutations(seeds[[7, 3]], 10), permutations[[7, 3]])
    # Each of 9 patches at each of 9 places: 222 times on average, 5 standard deviations are 71.
    counts = torch.stack([torch.bincount(permutations[:, place], minlength=10)[1:] for place in range(1, 10)])
    assert (counts - 2000 / 9).abs().max() < 71


def test_steps_draw_differently():
    hook, draws = EpochSeedHook(), []
    for seed, step in ((0, 0), (0, 3), (1, 0), (0, 0)):
        hook.seed = seed
        hook._seed_step(step)
        draws.append((torch.rand(1).item(), np.random.rand(), random.random()))
    assert len(set(draws)) == 3
    assert draws[0] == draws[3]
