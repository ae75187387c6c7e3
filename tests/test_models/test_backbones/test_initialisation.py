"""The authors' initialisation, and over it what `init_cfg` asks for, in every form that MMEngine takes."""

import pytest
import torch
from mmengine.model.weight_init import PretrainedInit
from mmengine.runner.checkpoint import save_checkpoint
from mmpretrain.registry import MODELS

from mapet_mm.models import MaPeTPretrainViT, MaPeTViT, TokenPredictionHead, TokenViT

ARCH = dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=48)
BUILDERS = {
    "MaPeTViT": lambda **options: MaPeTViT(ARCH, 20, 4, **options),
    "MaPeTPretrainViT": lambda **options: MaPeTPretrainViT(ARCH, 20, 4, 8, **options),
    "TokenViT": lambda **options: TokenViT(11, 5, ARCH, **options),
    "TokenPredictionHead": lambda **options: TokenPredictionHead(24, 11, **options),
}
CONSTANT = dict(type="Constant", layer="Linear", val=3.0)
FORMS = {
    "dict": lambda file: dict(type="Pretrained", checkpoint=file),
    "list of class": lambda file: [dict(type=PretrainedInit, checkpoint=file)],
    "before another": lambda file: [dict(type="Pretrained", checkpoint=file), CONSTANT],
    "prefix": lambda file: dict(type="Pretrained", checkpoint=file, prefix="part."),
}


def save(module, path, prefix=""):
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    state = {prefix + name: value for name, value in module.state_dict().items()}
    save_checkpoint({"state_dict": state}, str(path))
    return str(path), {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", BUILDERS)
def test_pretrained_weights_stay(kind, form, tmp_path):
    prefix = "part." if form == "prefix" else ""
    file, weights = save(BUILDERS[kind](), tmp_path / "weights.pth", prefix)
    module = BUILDERS[kind](init_cfg=FORMS[form](file))
    module.init_weights()
    for name, value in module.state_dict().items():
        assert torch.equal(value, weights[name]), name


@pytest.mark.parametrize("kind", BUILDERS)
def test_an_init_cfg_of_ones_own_is_the_last_word(kind):
    """Of the layers it names; the others keep the authors'."""
    module = BUILDERS[kind](init_cfg=[dict(type="TruncNormal", layer="Linear", std=0.5, bias=0.25)])
    module.init_weights()
    linears = [m for m in module.modules() if isinstance(m, torch.nn.Linear)]
    assert linears
    for linear in linears:  # within five standard errors
        deviation = linear.weight.std().item()
        assert deviation == pytest.approx(0.5, rel=5 / (2 * linear.weight.numel()) ** 0.5 + 0.12)
        assert linear.bias.eq(0.25).all()
    if hasattr(module, "pos_embed"):
        assert module.pos_embed.std().item() == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize("kind", BUILDERS)
def test_weights_are_drawn_once(kind):
    """MMEngine's modules leave weights alone that have been initialised, or are said to be."""
    drawn, told = BUILDERS[kind](), BUILDERS[kind]()
    drawn.init_weights()
    told.is_init = True
    for module in (drawn, told):
        before = {name: value.clone() for name, value in module.state_dict().items()}
        module.init_weights()
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("outside", [True, False])
def test_pretrained_weights_of_a_model_around_the_backbone_stay(outside, tmp_path):
    """Named by the classifier as a whole, or by its backbone behind a prefix."""

    def classifier(init_cfg=None, backbone_init_cfg=None):
        backbone = dict(type="mapet_mm.MaPeTViT", arch=ARCH, img_size=20, patch_size=4)
        head = dict(type="LinearClsHead", num_classes=3, in_channels=24)
        backbone["init_cfg"] = backbone_init_cfg
        return MODELS.build(dict(type="ImageClassifier", backbone=backbone, head=head, init_cfg=init_cfg))

    file, weights = save(classifier(), tmp_path / "weights.pth")
    whole = dict(type="Pretrained", checkpoint=file)
    model = classifier(whole) if outside else classifier(None, [dict(whole, prefix="backbone")])
    model.init_weights()
    for name, value in model.backbone.state_dict().items():
        assert torch.equal(value, weights[f"backbone.{name}"]), name
    assert torch.equal(model.head.fc.weight, weights["head.fc.weight"]) == outside
