"""A pre-training's steps on a GPU are a CPU's, wait for nothing, repeat, and are the same when compiled."""

import numpy as np
import pytest
import torch
from mmengine.runner.utils import set_random_seed
from pretrain_throughput import VARIANTS, PretrainingStep

from mapet_mm.evaluation.metrics.neighbours import knn_votes
from mapet_mm.models.data_preprocessors.color_jitter import BatchColorJitter
from mapet_mm.models.utils.permutation import seeded_permutations
from mapet_mm.tokenizers import KCLIP, fit_codebook

pytestmark = pytest.mark.gpu
GPU = "cuda"


def step_on(device: str, variant: str = "loop", images: int = 16, **options) -> PretrainingStep:
    """As in a training, of a ViT-T of two layers without stochastic depth."""
    options = dict(num_layers=2, drop_path_rate=0.0) | options
    return PretrainingStep(VARIANTS[variant], "tiny", images, device, **options)


def losses_of(step: PretrainingStep, count: int) -> torch.Tensor:
    return torch.stack([step() for _ in range(count)]).cpu()


def weights_of(step: PretrainingStep) -> torch.Tensor:
    return torch.cat([one.detach().flatten().cpu() for one in step.model.parameters()])


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def test_loss_and_gradients_of_a_step_are_those_of_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # of the patch convolution
    there = step_on("cpu", dtype="float32")
    here = step_on(GPU, dtype="float32")
    here.model.load_state_dict(there.model.state_dict())
    results = []
    for step in (there, here):
        loss = step.loss()
        loss.backward()
        gradients = [one.grad.flatten().cpu() for one in step.model.parameters()]
        results.append((loss.detach().cpu(), torch.cat(gradients)))
    (expected_loss, expected), (loss, gradients) = results
    assert relative_error(loss, expected_loss) < 1e-5
    assert relative_error(gradients, expected) < 1e-4


def test_steps_wait_for_nothing():
    step = step_on(GPU, num_layers=12)
    losses_of(step, 3)  # the first batches are looked at
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_losses_stay_together_in_every_precision():
    last = {
        dtype: losses_of(step_on(GPU, dtype=dtype), 20)[-1] for dtype in ("float32", "bfloat16", "float16")
    }
    assert last["bfloat16"].item() == pytest.approx(last["float32"].item(), rel=0.05)
    assert last["float16"].item() == pytest.approx(last["float32"].item(), rel=0.05)


@pytest.fixture
def _deterministic():
    set_random_seed(0, deterministic=True)  # as `randomness=dict(deterministic=True)` does
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


@pytest.mark.usefixtures("_deterministic")
def test_deterministic_steps_are_equal_bit_for_bit():
    runs = []
    for _ in range(2):
        step = step_on(GPU, drop_path_rate=0.1)
        losses_of(step, 5)
        runs.append(weights_of(step))
    assert torch.equal(*runs)


def test_a_step_with_a_nan_moves_no_weight():
    step = step_on(GPU)
    step()
    before = weights_of(step)
    step.wrapper.update_params(step.loss() * float("nan"))
    assert torch.equal(weights_of(step), before)
    step()
    after = weights_of(step)
    assert after.isfinite().all()
    assert not torch.equal(after, before)


def test_draws_of_a_seed_are_those_of_a_cpu():
    seeds = torch.from_numpy(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 4096))
    assert torch.equal(seeded_permutations(seeds.to(GPU), 197).cpu(), seeded_permutations(seeds, 197))
    images = 255 * torch.rand(16, 3, 32, 32)
    jitter = BatchColorJitter(brightness=0.4, contrast=0.4, saturation=0.4)
    expected = jitter(images, seeds[:16])
    found = jitter.to(GPU)(images.to(GPU), seeds[:16].to(GPU)).cpu()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-2)


def test_tokens_and_votes_are_those_of_a_cpu():
    tower = dict(layers=[1, 1, 1, 1], width=16, image_size=64)
    random = dict(type="random", seed=0)
    images = torch.randn(16, 3, 64, 64)
    features = KCLIP(tower, pretrained=random).features(images)
    tokenizer = KCLIP(tower, pretrained=random, codebook=fit_codebook(features.flatten(0, 1), k=16))
    expected = tokenizer(images)
    found = tokenizer.to(GPU)(images.to(GPU)).cpu()
    assert (found != expected).float().mean() < 0.02

    queries, keys, labels = torch.randn(300, 32), torch.randn(2000, 32), torch.randint(10, (2000,))
    there = knn_votes(queries, [(keys, labels)], 10).argmax(1)
    here = knn_votes(queries.to(GPU), [(keys, labels)], 10).argmax(1).cpu()
    assert (here != there).sum() <= 1
