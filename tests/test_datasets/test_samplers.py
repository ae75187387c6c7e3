"""What an image's draws depend on, and what the wrappers pass on."""

import pickle

import pytest
import torch
from mmengine.dataset import DefaultSampler, InfiniteSampler
from mmpretrain.datasets.samplers import RepeatAugSampler
from torch.utils.data import DataLoader
from trainings import BATCH, IMAGES, JitteredNoise

from mapet_mm.datasets.pipelines import leaf_datasets
from mapet_mm.datasets.samplers import (
    SeededDataset,
    SeededIndex,
    SeededSampler,
    draw_seed,
    epoch_state,
    seeded_loader,
)
from mapet_mm.models.utils.permutation import seeded_permutations


def ordered(dataset) -> DefaultSampler:
    return DefaultSampler(dataset, shuffle=False)


# Of seed 3, epoch 2, at places 0, 1 and a million.
SEEDS = [3219854396864964895, 4713021844449198008, 3286002280640709950]


def test_draws_come_from_seed_epoch_and_image():
    def epoch(workers: int, number: int, start: int = 0, batch: int = BATCH) -> dict:
        dataset = SeededDataset(JitteredNoise())
        sampler = SeededSampler(ordered(dataset), seed=1)
        sampler.set_epoch(number)
        sampler.start = start
        loader = DataLoader(dataset, batch, sampler=sampler, num_workers=workers, collate_fn=list)
        samples = [
            (one["inputs"].numpy().tobytes(), one["data_samples"]) for group in loader for one in group
        ]
        return {int(sample.img_path): (pixels, sample.draw_seed) for pixels, sample in samples}

    first = epoch(0, 0)
    assert epoch(2, 0) == first == epoch(0, 0, batch=3)
    other = epoch(0, 1)
    assert all(other[index] != first[index] for index in first)
    assert epoch(0, 0, start=4) == {index: first[index] for index in range(4, 10)}


def test_seeds_are_those_of_the_splitmix_generator():
    """As the recorded trainings have them: a change would change every result."""
    state = epoch_state(3, 2)
    assert [draw_seed(state, place) for place in (0, 1, 10**6)] == SEEDS
    assert len({draw_seed(epoch_state(3, epoch), place) for epoch in range(3) for place in range(9)}) == 27


def test_processes_share_one_order(monkeypatch):
    def seeds(rank: int, world_size: int) -> dict[int, int]:
        monkeypatch.setattr("mapet_mm.datasets.samplers.get_dist_info", lambda: (rank, world_size))
        monkeypatch.setattr("mmengine.dataset.sampler.get_dist_info", lambda: (rank, world_size))
        return {int(index): index.seed for index in SeededSampler(ordered(range(8)), seed=5)}

    assert seeds(0, 2) | seeds(1, 2) == seeds(0, 1)
    assert len(seeds(0, 2)) == 4


def test_copies_of_an_image_differ():
    sampler = SeededSampler(RepeatAugSampler(range(4), shuffle=False), seed=5)
    one, two, three, _ = sampler
    assert (one, two, three) == (0, 0, 0)
    assert len({one.seed, two.seed, three.seed}) == 3


@pytest.mark.skipif(not hasattr(InfiniteSampler, "skip"), reason="MMEngine 0.10.7 skips batch by batch")
def test_an_endless_sampler_is_skipped_and_its_seeds_go_on():
    whole = iter(SeededSampler(InfiniteSampler(range(5), seed=2), seed=2))
    all_indices = [(int(index), index.seed) for index, _ in zip(whole, range(12), strict=False)]
    later = SeededSampler(InfiniteSampler(range(5), seed=2), seed=2)
    later.skip(7)
    rest = [(int(index), index.seed) for index, _ in zip(later, range(5), strict=False)]
    assert rest == all_indices[7:]
    assert [index for index, _ in all_indices] == [
        index for index, _ in zip(InfiniteSampler(range(5), seed=2), range(12), strict=False)
    ]
    assert not hasattr(SeededSampler(ordered(range(5)), seed=2), "skip")


@pytest.mark.parametrize("own", [7, None])
def test_a_seeded_loader_is_the_loader_with_seeds(own):
    """Its images are in the order of the sampler's own seed, or the run's; all else stays."""
    config = dict(type="DefaultSampler", shuffle=True) | ({} if own is None else {"seed": own})
    before = DataLoader(list(range(IMAGES)), 4, num_workers=2, collate_fn=list, drop_last=True, timeout=9)
    loader = seeded_loader(before, config, seed=5)
    batches = [index for batch in loader.batch_sampler for index in batch]
    assert batches == list(DefaultSampler(range(IMAGES), seed=own or 5))[:8]
    assert batches[0].seed == draw_seed(epoch_state(5, 0), 0)
    for name in ("batch_size", "drop_last", "num_workers", "collate_fn", "timeout", "prefetch_factor"):
        assert getattr(loader, name) == getattr(before, name), name


def test_wrappers_survive_other_start_methods_and_pass_attributes_on():
    dataset = JitteredNoise()
    dataset.pipeline = "old"
    wrapped = pickle.loads(pickle.dumps(SeededDataset(dataset)))
    assert wrapped.pipeline == "old"
    wrapped.pipeline = "new"
    assert wrapped.dataset.pipeline == "new"
    assert not hasattr(wrapped, "metainfo")
    again = pickle.loads(pickle.dumps(SeededIndex(7, 5)))
    assert (again, again.seed) == (7, 5)
    assert isinstance(wrapped[5]["inputs"], torch.Tensor)  # without a seed: as it is
    assert SeededDataset([torch.ones(2)])[SeededIndex(0, 5)].tolist() == [1, 1]  # no data sample


def test_datasets_are_found_inside_wrappers():
    inner = [JitteredNoise() for _ in range(3)]
    one, two, three = (SeededDataset(dataset) for dataset in inner)
    subset = torch.utils.data.Subset(torch.utils.data.ConcatDataset([one, two]), [0, 1])
    assert list(leaf_datasets(subset)) == inner[:2]
    assert list(leaf_datasets(three)) == inner[2:]


def test_permutations_depend_on_their_seed_alone():
    seeds = torch.tensor([draw_seed(epoch_state(0, 0), place) for place in range(2000)])
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
    assert len(seeded_permutations(seeds, 26).unique(dim=0)) == 2000
