"""Tokenizers that are trained here: they learn, and what they save gives the tokens that they had learnt."""

import lab.tokenizer_training  # noqa: F401, registers the algorithms
import pytest
import torch
from mmengine.registry import DefaultScope
from mmengine.runner import save_checkpoint
from mmpretrain.structures import DataSample
from small_tokenizers import DALLE, vqkd
from torch import Tensor, nn

from mapet_mm.registry import MODELS
from mapet_mm.tokenizers import KCLIP, FrozenTokenizer

pytestmark = pytest.mark.slow

TOWER = dict(layers=[1, 1, 1, 1], width=8)
CLIP = dict(
    type="mapet_mm.CaptionCLIP",
    vision=TOWER,
    text=dict(layers=1, width=16, heads=2),
    embed_dims=8,
    image_size=32,
    class_names=("ankle boot", "bag"),
    stride=16,
)
VQKD = vqkd(16)


@pytest.fixture(autouse=True)
def _default_scope():
    """MMPretrain's types are found without a prefix."""
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        yield


def train(model: nn.Module, inputs, samples=None, steps: int = 30, lr: float = 3e-3) -> tuple[float, float]:
    """The first and the last sum of the losses."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr)
    totals = []
    for _ in range(steps):
        losses = model(inputs, samples, mode="loss")
        total = sum(losses.values())
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        totals.append(total.item())
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    return totals[0], totals[-1]


def striped(size: int, count: int = 16) -> Tensor:
    """Images of two kinds: horizontal and vertical stripes, each with a phase of its own."""
    along = torch.arange(size) * 0.8
    phases = torch.arange(count)[:, None] * 0.7
    waves = torch.sin(along + phases)
    images = waves[:, None, :, None].expand(-1, 3, size, size).clone()
    images[1::2] = images[1::2].mT
    return images


@pytest.fixture
def save(tmp_path):
    def write(model: nn.Module) -> str:
        save_checkpoint({"state_dict": model.state_dict()}, str(tmp_path / "epoch_1.pth"))
        return str(tmp_path / "epoch_1.pth")

    return write


def test_a_clip_learns_classes_from_captions_and_its_tower_is_kclips(save):
    torch.manual_seed(0)
    clip = MODELS.build(CLIP)
    assert clip.captions.shape == (2, 8, 16)
    assert not torch.equal(clip.captions[0, 0], clip.captions[1, 0])
    images = striped(32)
    samples = [DataSample().set_gt_label(label % 2) for label in range(16)]
    first, last = train(clip, images, samples)
    # Eight images of each class share a caption: nobody can tell them apart, so the loss ends at log(8).
    assert first > last > 2.0
    assert last == pytest.approx(torch.tensor(8.0).log().item(), abs=0.2)
    # With the batch's statistics: the mean ones are not there yet.
    predicted = clip(images, samples, mode="predict")
    assert [sample.pred_label.item() for sample in predicted] == [label % 2 for label in range(16)]
    assert predicted[0].pred_score.sum().item() == pytest.approx(1)

    clip.eval()
    kclip = KCLIP(dict(image_size=32, **TOWER), save(clip), stride=16)
    pooled = []
    clip.clip.visual.attnpool.register_forward_pre_hook(lambda _, inputs: pooled.append(inputs[0]))
    with torch.no_grad():
        clip(images)
    torch.testing.assert_close(kclip.features(images), pooled[0].flatten(2).transpose(1, 2))
    assert kclip.grid == (2, 2)


def test_a_vqkd_learns_its_teachers_features_and_keeps_its_tokens(save):
    torch.manual_seed(0)
    teacher = dict(
        type="mapet_mm.KCLIP",
        clip_model=dict(image_size=64, **TOWER),
        pretrained=dict(type="random", seed=0),
        stride=16,
    )
    model = MODELS.build(dict(type="mapet_mm.VQKDDistillation", tokenizer=VQKD, teacher=teacher, grid=(4, 4)))
    model.init_weights()
    model.train()
    views = [striped(16), striped(64)]
    first, last = train(model, views)
    assert last < 0.7 * first
    assert not [name for name in model.state_dict() if name.startswith("teacher")]
    model.eval()
    frozen = FrozenTokenizer(
        dict(VQKD, init_cfg=dict(type="Pretrained", checkpoint=save(model), prefix="tokenizer.")), 16, 16
    )
    assert torch.equal(frozen(views[0]), model(views))
    assert len(frozen(views[0]).unique()) > 2


def test_a_discrete_autoencoder_learns_the_pixels_and_keeps_its_tokens(save):
    torch.manual_seed(0)
    model = MODELS.build(dict(type="mapet_mm.DiscreteAutoencoder", tokenizer=DALLE))
    model.init_weights()
    images = striped(16)
    first, last = train(model, images, steps=40)
    assert last < 0.8 * first
    model.eval()
    frozen = FrozenTokenizer(
        dict(DALLE, init_cfg=dict(type="Pretrained", checkpoint=save(model), prefix="tokenizer.")), 16, 16
    )
    with torch.no_grad():
        assert torch.equal(frozen(images), model(images).argmax(1).flatten(1))
    assert len(frozen(images).unique()) > 2
