"""Weights and config of an evaluation: found under the usual prefixes, read safely, or refused."""

from pathlib import Path

import pytest
import timm
import torch
from config_building import RECIPES, in_scope, label, load
from frozen_features import PIPELINE, save, take
from mmengine.config import Config
from mmengine.runner.checkpoint import CheckpointLoader
from safetensors.torch import save_file
from starts import save_run
from torch import nn

import mapet_mm
from mapet_mm.evaluation import weights as checkpoint_weights
from mapet_mm.evaluation.checkpoints import backbone_of, load_checkpoint
from mapet_mm.evaluation.weights import WeightsError, load_weights
from mapet_mm.models import MaPeTViT
from mapet_mm.registry import MODELS
from mapet_mm.utils.errors import UserError

METHODS = ("mapet", "pim", "mim")
PRETRAINING = [path for path in RECIPES if path.parent.name in METHODS]

ONE = torch.ones(16)


@pytest.fixture
def weights(config, root) -> dict:
    return torch.load(root / "weights.pth")["state_dict"]


def digest(config, root) -> str:
    return load_checkpoint(config, str(root / "weights.pth")).digest


def test_weights_find_their_backbone_under_the_usual_prefixes(config, root, weights, capsys):
    """A backbone alone, a classifier with another head, several processes' wrapper, a teacher beside it."""
    expected = digest(config, root)
    bare = {name.removeprefix("backbone."): value for name, value in weights.items()}
    others = {f"backbone.{name}": ONE for name in ("head.weight", "decoder_blocks.0.bias", "ln2.bias")}
    others |= {"backbone.mask_token": ONE, "neck.decoder.0.bias": ONE, "head.fc.bias": ONE}
    others |= {"backbone.layers.0.attn.relative_position_index": ONE.long()}
    for form in (
        bare,
        weights | others,
        {f"module.{name}": value for name, value in (weights | others).items()} | dict(steps=ONE),
        {f"_orig_mod.{name}": value for name, value in weights.items()},
        {name.replace("backbone.", "backbone._orig_mod."): value for name, value in weights.items()},
        weights | {f"teacher.{name}": value + 1 for name, value in bare.items()},
    ):
        save(form, root)
        assert digest(config, root) == expected
    assert "left out, because no features need them: `teacher`" in capsys.readouterr().out
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


def test_weights_at_an_unusual_place_are_loaded_by_their_prefix(config, root, weights):
    expected = digest(config, root)
    file = str(root / "weights.pth")
    bare = {name.removeprefix("backbone."): value for name, value in weights.items()}
    save({f"{side}.{name}": value for side in ("left", "right") for name, value in bare.items()}, root)
    for prefix in (None, "middle."):
        with pytest.raises(WeightsError, match="--prefix"):
            load_checkpoint(config, file, prefix)
    assert load_checkpoint(config, file, "right.").digest == expected
    with pytest.raises(WeightsError, match=r"but under `left\.`, `right\.`: choose by --prefix"):
        load_checkpoint(config, file)
    save({f"module.student.backbone.{name}": value for name, value in bare.items()}, root)
    with pytest.raises(WeightsError, match=r"for example --prefix student\.backbone\.$"):
        load_checkpoint(config, file)
    for prefix in ("student.backbone.", "module.student.backbone."):
        assert load_checkpoint(config, file, prefix).digest == expected


def test_of_weights_at_several_usual_places_the_most_usual_is_taken(config, root, weights):
    """A training's before a bare network's, and these before those of timm's or Hugging Face's wrappers."""
    config.test_dataloader = dict(dataset=dict(pipeline=PIPELINE))
    config.dump(root / "config.py")
    usual = ("backbone.", "", "model.", "model.backbone.", "backbone.timm_model.")
    for first in range(len(usual)):
        kept = {}
        for number, prefix in enumerate(usual[first:], start=first):
            for name, value in weights.items():
                kept[prefix + name.removeprefix("backbone.")] = torch.full_like(value, number)
        save(kept, root)
        vit = mapet_mm.load(root / "config.py", root / "weights.pth").model
        assert {value.unique().item() for value in vit.state_dict().values()} == {first}


def test_what_features_do_not_need_is_left_out_and_printed(config, root, weights, capsys):
    others = dict.fromkeys(("head.fc.weight", "backbone.mask_token", "backbone.ln2.bias", "neck.w"), ONE)
    save(weights | others, root)
    config.model.backbone.update(type="VisionTransformer", layer_scale_init_value=0.1)
    load_checkpoint(config, str(root / "weights.pth"))
    assert "need them: `backbone.ln2`, `backbone.mask_token`, `head`, `neck`" in capsys.readouterr().out


def test_the_mask_token_of_a_continued_vit_is_left_out_by_its_name(config, root, capsys):
    """It lies beside timm's network, under `backbone.`."""
    options = dict(model_name="vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1)
    config.model.backbone = dict(type="TIMMBackbone", **options)
    network = timm.create_model(num_classes=0, **options)
    weights = {f"backbone.timm_model.{name}": value for name, value in network.state_dict().items()}
    save(weights | {"backbone.mask_token": ONE, "head.projection.weight": ONE}, root)
    load_checkpoint(config, str(root / "weights.pth"))
    assert "no features need them: `backbone.mask_token`, `head`" in capsys.readouterr().out


def test_a_missing_weight_is_not_a_number_and_refused_if_features_need_it(config, root, weights):
    gone = "backbone.layers.1.ffn.layers.1.weight"
    save({name: value for name, value in weights.items() if name != gone}, root)
    with pytest.raises(UserError, match=r"lacks 1 weights, `layers\.1\.ffn\.layers\.1\.weight`"):
        take(config, root / "cache")
    config.model.backbone.update(out_type="avg_featmap", final_norm=False)  # whose `ln2` no layer needs
    save(weights, root)
    assert take(config, root / "cache").layers == ["1", "2"]
    assert load_checkpoint(config, str(root / "weights.pth")).missing == ("ln2.weight", "ln2.bias")


def test_weights_at_an_address_are_read_as_safely_as_a_file(config, root, weights, monkeypatch):
    """Whatever the config calls them, MMEngine, which would run what they hold, gets none."""
    expected = digest(config, root)
    monkeypatch.setattr(checkpoint_weights, "released_weights", {"mapet://a-name": root / "weights.pth"}.get)
    assert load_checkpoint(config, "mapet://a-name").digest == expected
    monkeypatch.setattr(CheckpointLoader, "load_checkpoint", None)
    read = []
    monkeypatch.setattr(checkpoint_weights, "read_weights", lambda path: read.append(path) or weights)
    addresses = [f"https://example.org/{number}.pth" for number in range(4)]
    config.load_from = addresses[1]
    init_cfg = dict(type="Pretrained", checkpoint=addresses[2])
    assert load_checkpoint(config, addresses[0]).digest == load_checkpoint(config, None).digest == expected
    config.load_from = None
    config.model.backbone.init_cfg = init_cfg
    assert load_checkpoint(config, None).digest == expected
    config.model.backbone.init_cfg = None
    config.model.pretrained = addresses[3]  # as MMSegmentation has it
    assert load_checkpoint(config, None).digest == expected
    assert read == addresses


class Canary:
    """What runs code if it is unpickled."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_weights_of_a_part_of_the_backbone_run_no_code_and_give_no_figure(config, root, with_checkpoint):
    """LoRA names its network's weights itself, and hides this network from every check of names."""
    torch.save({"state_dict": {}, "meta": Canary(root / "ran")}, root / "part.pth")
    init_cfg = dict(type="Pretrained", checkpoint=str(root / "part.pth"), prefix="backbone.")
    part = dict(config.model.backbone, init_cfg=init_cfg)
    targets = [dict(type=".*qkv")]
    config.model.backbone = dict(type="LoRAModel", module=part, alpha=2, rank=2, targets=targets)
    noun = "state dict" if with_checkpoint else r"backbone\.module\.init_cfg"
    with pytest.raises(UserError, match=noun):
        load_checkpoint(config, str(root / "weights.pth") if with_checkpoint else None)
    assert not (root / "ran").exists()


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
    assert type(loaded.backbone.model) is MaPeTViT
    assert torch.equal(loaded.backbone.model.pos_embed, weights["backbone.pos_embed"])
    assert set(weights) == {f"backbone.{name}" for name in loaded.backbone.model.state_dict()}


@pytest.mark.parametrize("section", ["model", "data_preprocessor"])
def test_a_config_without_a_model_or_its_normalisation_is_refused(config, section):
    changed = Config({name: one for name, one in config.items() if name != section})
    with pytest.raises(UserError, match=section):
        load_checkpoint(changed, None)
    config.data_preprocessor = dict()  # says that images stay as they are
    images = torch.arange(12.0).view(1, 3, 2, 2)
    assert torch.equal(load_checkpoint(config, None).backbone.normalise(images), images)


@pytest.mark.parametrize("path", PRETRAINING, ids=label)
def test_the_backbone_of_each_pre_training_recipe_is_built(path):
    cfg = load(path)
    with torch.device("meta"), in_scope(cfg):
        network = MODELS.build(backbone_of(cfg.model))
    assert network.img_size in ((224, 224), [224, 224])


def test_a_backbone_that_names_a_run_has_its_weights_and_a_random_twin(tmp_path):
    trained = save_run("dinov3", tmp_path)
    backbone = dict(type="mapet_mm.TIMMViT", model_name=str(tmp_path), out_indices=[1])
    preprocessor = dict(mean=[0.0] * 3, std=[1.0] * 3)
    config = Config(
        dict(model=dict(backbone=backbone, type="ImageClassifier"), data_preprocessor=preprocessor)
    )
    weights = []
    for random in (False, True):
        loaded = load_checkpoint(config, None, random=random)
        assert loaded.is_random == random
        weights.append(loaded.backbone.network.blocks[0].mlp.fc1.weight)
    own = trained.timm_model.blocks[0].mlp.fc1.weight
    assert torch.equal(weights[0], own)
    assert weights[1].shape == own.shape
    assert not torch.equal(weights[1], own)
