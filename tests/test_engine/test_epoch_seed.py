"""A training that was stopped and resumed ends bit for bit where an undisturbed one does."""

import numpy as np
import pytest
import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner
from mmpretrain.structures import DataSample
from torch.utils.data import Dataset

from mapet_mm.registry import DATASETS

ARCH = dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=48)


@DATASETS.register_module()
class JitteredNoise(Dataset):
    """Fixed noise images, each read with noise of NumPy's global generator on top, and token grids."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict:
        rng = np.random.default_rng(index)
        image = rng.integers(0, 200, (3, 16, 16)) + np.random.randint(0, 50, (3, 16, 16))
        grid = rng.integers(0, 8, (4, 4))
        return dict(
            inputs=torch.from_numpy(image.astype(np.uint8)),
            data_samples=DataSample(metainfo=dict(img_path=str(index)), token_grid=grid),
        )


class StopAfter(Hook):
    """Ends the run after an epoch, as a kill would."""

    priority = "VERY_LOW"

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def after_train_epoch(self, runner: Runner) -> None:
        if runner.epoch + 1 == self.epoch:
            raise KeyboardInterrupt


def runner(work_dir, hooks: dict, resume: bool = False) -> Runner:
    return Runner(
        model=dict(
            type="mapet_mm.MaPeT",
            backbone=dict(
                type="mapet_mm.MaPeTPretrainViT",
                arch=ARCH,
                img_size=16,
                patch_size=4,
                cutting_point=5,
                drop_path_rate=0.3,
            ),
            head=dict(type="mapet_mm.TokenPredictionHead", embed_dims=24, vocab_size=8),
            target_generator=dict(type="mapet_mm.PrecomputedTokens", vocab_size=8),
            data_preprocessor=dict(type="mapet_mm.TokenGridDataPreprocessor", mean=[128.0], std=[64.0]),
        ),
        work_dir=str(work_dir),
        train_dataloader=dict(
            batch_size=4,
            num_workers=0,
            sampler=dict(type="DefaultSampler", shuffle=True),
            dataset=dict(type="mapet_mm.JitteredNoise"),
            collate_fn=dict(type="default_collate"),
        ),
        train_cfg=dict(by_epoch=True, max_epochs=4),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=1e-3)),
        default_hooks=dict(
            sampler_seed=dict(type="DistSamplerSeedHook"),
            checkpoint=dict(type="CheckpointHook", interval=1),
            **hooks,
        ),
        randomness=dict(seed=3),
        resume=resume,
        default_scope="mmpretrain",
        experiment_name=work_dir.name + str(resume),
    )


def final_weights(work_dir) -> dict[str, torch.Tensor]:
    return torch.load(work_dir / "epoch_4.pth", weights_only=False)["state_dict"]


@pytest.mark.parametrize("hooked", [True, False])
def test_resumed_training_equals_an_undisturbed_one(hooked, tmp_path):
    """Permutations, jitter, stochastic depth and order of the images; without the hook they differ."""
    hooks = dict(epoch_seed=dict(type="mapet_mm.EpochSeedHook")) if hooked else {}
    runner(tmp_path / "whole", hooks).train()

    stopped = runner(tmp_path / "parts", hooks)
    stopped.register_hook(StopAfter(2))
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    torch.rand(7)  # another state of the generators than the first process had
    runner(tmp_path / "parts", hooks, resume=True).train()

    whole, parts = final_weights(tmp_path / "whole"), final_weights(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole) == hooked


def test_epochs_draw_differently():
    """The seed of an epoch follows from the iteration reached, the run's seed and the process."""
    from types import SimpleNamespace

    from mapet_mm.engine.epoch_seed import EpochSeedHook

    draws = []
    for seed, iteration in ((0, 0), (0, 3), (1, 0), (0, 0)):
        EpochSeedHook().before_train_epoch(SimpleNamespace(seed=seed, iter=iteration))
        draws.append((torch.rand(1).item(), np.random.rand()))
    assert len(set(draws)) == 3
    assert draws[0] == draws[3]
