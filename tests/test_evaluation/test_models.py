"""Weights and config of an evaluation: found under any prefix, or refused."""

import pytest
import torch
from frozen_features import save, take
from mmengine.config import Config
from safetensors.torch import save_file
from torch import nn

from mapet_mm.evaluation.models import WeightsError, load_checkpoint, load_weights
from mapet_mm.utils.errors import UserError

ONE = torch.ones(16)


@pytest.fixture
def weights(config, root) -> dict:
    return torch.load(root / "weights.pth")["state_dict"]


def digest(config, root) -> str:
    return load_checkpoint(config, str(root / "weights.pth")).digest


def test_weights_find_their_backbone_under_any_prefix(config, root, weights):
    """A backbone alone, a classifier with another head, a teacher beside it, a prefix of one's own."""
    expected = digest(config, root)
    bare = {name.removeprefix("backbone."): value for name, value in weights.items()}
    others = {f"backbone.{name}": ONE for name in ("head.weight", "decoder_blocks.0.bias", "ln2.bias")}
    others |= {"backbone.mask_token": ONE, "neck.decoder.0.bias": ONE, "head.fc.bias": ONE}
    others |= {"backbone.layers.0.attn.relative_position_index": ONE.long()}
    for form in (
        bare,
        weights | others,
        {f"module.{name}": value for name, value in (weights | others).items()} | dict(steps=ONE),
        weights | {f"teacher.{name}": value + 1 for name, value in bare.items()},
    ):
        save(form, root)
        assert digest(config, root) == expected
    save_file(weights, root / "weights.safetensors")
    assert load_checkpoint(config, str(root / "weights.safetensors")).digest == expected
    config.model = config.model.backbone
    assert digest(config, root) == expected


def test_without_a_checkpoint_weights_are_those_that_the_config_names(config, root, weights):
    save({name: value + 1 for name, value in weights.items()}, root)
    expected, random = digest(config, root), load_checkpoint(config, None).digest
    assert random != expected
    assert load_checkpoint(config, None).digest == random  # one seed
    config.load_from = str(root / "weights.pth")
    assert load_checkpoint(config, None).digest == expected
    config.load_from = None
    init_cfg = dict(type="Pretrained", checkpoint=str(root / "weights.pth"))
    for part, key in ((config.model, "model"), (config.model.backbone, "model.backbone")):
        part.init_cfg = init_cfg
        assert load_checkpoint(config, None).digest == expected
        part.init_cfg = dict(init_cfg, checkpoint="")
        with pytest.raises(UserError, match=rf"`{key}\.init_cfg\.checkpoint` open"):
            load_checkpoint(config, None)
        part.init_cfg = None


PLAIN = dict(type="VisionTransformer", layer_scale_init_value=0.5)
REFUSED = [
    # weights that are added, options of the backbone, the name in the message
    ({}, dict(PLAIN, layer_scale_init_value=0.0), "layers.0.attn.gamma1.weight"),
    ({}, dict(PLAIN, qkv_bias=False), "layers.0.attn.qkv.bias"),
    ({}, dict(PLAIN, with_cls_token=False, out_type="raw"), "cls_token"),
    ({"backbone.reg_token": ONE}, PLAIN, "reg_token"),
    ({"backbone.pre_norm.bias": ONE}, PLAIN, "pre_norm.bias"),
    ({"backbone.patch_embed.norm.bias": ONE}, PLAIN, "patch_embed.norm.bias"),
    ({"backbone.layers.2.ln1.bias": ONE}, PLAIN, "layers.2.ln1.bias"),
    ({"backbone.layers.1.ffn.layers.1.weight": torch.zeros(3, 3)}, PLAIN, "size mismatch"),
]


@pytest.mark.parametrize(("added", "options", "named"), REFUSED)
def test_weights_of_another_backbone_are_refused(config, root, weights, added, options, named):
    """Registers, LayerScale, biases, more layers: features without them would differ."""
    save(weights | added, root)
    config.model.backbone.update(options)
    with pytest.raises(WeightsError, match=named.replace(".", r"\.")):
        load_checkpoint(config, str(root / "weights.pth"))


def test_no_weights_or_two_networks_are_refused(config, root, weights):
    save({f"blocks.{place}.w": value for place, value in enumerate(weights.values())}, root)
    with pytest.raises(WeightsError, match="no weights"):
        load_checkpoint(config, str(root / "weights.pth"))
    bare = {name.removeprefix("backbone."): value for name, value in weights.items()}
    save({f"{side}.{name}": value for side in ("left", "right") for name, value in bare.items()}, root)
    with pytest.raises(WeightsError, match="several networks"):
        load_checkpoint(config, str(root / "weights.pth"))


def test_a_missing_weight_is_not_a_number_and_refused_if_features_need_it(config, root, weights):
    gone = "backbone.layers.1.ffn.layers.1.weight"
    save({name: value for name, value in weights.items() if name != gone}, root)
    with pytest.raises(UserError, match=r"lacks 1 weights, `layers\.1\.ffn\.layers\.1\.weight`"):
        take(config, root / "cache")
    config.model.backbone.update(out_type="avg_featmap", final_norm=False)  # whose `ln2` no layer needs
    save(weights, root)
    assert take(config, root / "cache").layers == ["1", "2"]
    assert load_checkpoint(config, str(root / "weights.pth")).missing == ("ln2.weight", "ln2.bias")


def test_weights_at_an_address_are_loaded_by_mmengine(config, root, weights, monkeypatch):
    expected = digest(config, root)
    monkeypatch.setattr("mapet_mm.interop.released.load", lambda *_: dict(state_dict=weights))
    assert load_checkpoint(config, "mapet://a-name").digest == expected


def test_a_missing_table_of_places_is_the_models_own(root):
    network = nn.Linear(2, 3)
    network.register_buffer("relative_position_index", torch.arange(3))
    save({"backbone.weight": torch.ones(3, 2)}, root)
    assert load_weights(network, str(root / "weights.pth")) == ["bias", "relative_position_index"]
    assert network.bias.isnan().all()
    assert network.relative_position_index.tolist() == [0, 1, 2]


def test_a_pre_training_is_loaded_without_its_tokenizer(config, root, weights):
    config.model = dict(
        type="mapet_mm.MaPeT",
        backbone=dict(config.model.backbone, type="mapet_mm.MaPeTPretrainViT", cutting_point=6),
        target_generator=dict(type="mapet_mm.KCLIP", codebook="nowhere"),
    )
    config.model.backbone.pop("out_type")
    loaded = load_checkpoint(config, str(root / "weights.pth"))
    assert torch.equal(loaded.backbone.model.pos_embed, weights["backbone.pos_embed"])


@pytest.mark.parametrize("section", ["model", "data_preprocessor"])
def test_a_config_without_a_model_or_its_normalisation_is_refused(config, section):
    changed = Config({name: one for name, one in config.items() if name != section})
    with pytest.raises(UserError, match=section):
        load_checkpoint(changed, None)
    config.data_preprocessor = dict()  # says that images stay as they are
    images = torch.arange(12.0).view(1, 3, 2, 2)
    assert torch.equal(load_checkpoint(config, None).backbone.normalise(images), images)
