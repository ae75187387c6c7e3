"""Configs in MMEngine's Python style: classes instead of names, and no default scope."""

import importlib
import shutil
from pathlib import Path

import pytest
import torch
from few_images import few_images_config
from frozen_features import rows_of
from mmengine.config import Config
from mmengine.model import PretrainedInit
from mmpretrain.models import VQKD

import mapet_mm.registry
from mapet_mm.engine.runners.build_runner import build_runner
from mapet_mm.engine.runners.launch import configure_training, load_config
from mapet_mm.evaluation.checkpoints import load_checkpoint
from mapet_mm.evaluation.image_sets import read_image_sets
from mapet_mm.evaluation.protocol import build_protocol
from mapet_mm.evaluation.protocols.label_free import LabelFree
from mapet_mm.models.target_generators.frozen_tokenizer import split_checkpoint
from mapet_mm.tokenizers.fit_and_extract import run_extract_tokens, run_fit_codebook
from mapet_mm.utils.config import read_config, scope_of

CONFIGS = Path(__file__).parents[1] / "python_configs"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with configs of classes, a few images and their tokens."""
    folder = tmp_path_factory.mktemp("project")
    few_images_config(folder)
    for file in CONFIGS.glob("*.py"):
        shutil.copy(file, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_fit_codebook(read_config("kclip.py"))
        run_extract_tokens(read_config("kclip.py"))
        yield folder


def train(config: str, work_dir: str, **options) -> dict[str, torch.Tensor]:
    """The weights after a training as tools/train.py runs it."""
    cfg = load_config(config, options, work_dir)
    configure_training(cfg)
    build_runner(cfg, "none").train()
    return torch.load(f"{work_dir}/epoch_2.pth", weights_only=True)["state_dict"]


@pytest.fixture(scope="module")
def pretrained(project):
    return train("mapet.py", "run")


def test_a_config_of_names_goes_on_with_the_tokens_of_one_of_classes(project):
    read_config("kclip.py").dump("kclip_of_paths.py")
    text = Path("kclip_of_paths.py").read_text()
    of_names = text.replace("mmpretrain.datasets.", "").replace("mmcv.transforms.", "")
    Path("kclip_of_names.py").write_text(of_names)
    for config in ("kclip_of_paths.py", "kclip_of_names.py"):
        store, done = run_extract_tokens(read_config(config))
        assert (done.images, len(store)) == (0, 17)


def test_a_pre_training_of_classes_has_the_weights_of_one_of_names(project, pretrained):
    """MMEngine writes each run's config with the classes' paths: the third form of a type."""
    of_paths = train("run/mapet.py", "run_of_paths")
    assert "type='mapet_mm.models.MaPeT'" in Path("run/mapet.py").read_text().replace('"', "'")
    assert all(torch.equal(pretrained[name], of_paths[name]) for name in pretrained)


def test_the_library_behind_a_model_is_the_default_scope(project):
    assert read_config("mapet.py").default_scope == "mmpretrain"
    Path("segmentor.py").write_text(
        "from mmseg.models import EncoderDecoder\nmodel = dict(type=EncoderDecoder)\ndefault_scope = None\n"
    )
    assert read_config("segmentor.py").default_scope == "mmseg"
    Path("plain.py").write_text("model = dict(type='mapet_mm.MaPeTViT')\n")
    plain = read_config("plain.py")
    assert "default_scope" not in plain, "results of tables depend on the whole config"
    assert scope_of(plain) == "mmpretrain"
    assert scope_of(Config(dict(model=dict(type="mmseg.EncoderDecoder"), default_scope="mmdet"))) == "mmdet"


def test_a_config_that_a_program_has_read_by_itself_is_evaluated(project, pretrained):
    cfg = Config.fromfile("mapet.py")
    assert cfg.default_scope is None
    checkpoint = load_checkpoint(cfg, "run/epoch_2.pth")
    assert checkpoint.digest == load_checkpoint("mapet.py", "run/epoch_2.pth").digest
    protocols = [
        build_protocol(one) for one in (dict(type="mapet_mm.NearestNeighbours", k=3), dict(type=LabelFree))
    ]
    rows = rows_of(checkpoint, read_image_sets(cfg), protocols, project / "cache")
    assert {"k-NN", "RankMe"} <= {row.protocol for row in rows}


def test_fine_tuning_starts_from_the_pre_trained_weights(project, pretrained):
    checkpoint = {"model.backbone.init_cfg.checkpoint": "run/epoch_2.pth"}
    still = {"optim_wrapper.optimizer.lr": 0.0}
    tuned = train("classifier.py", "tuned", **checkpoint, **still)
    assert torch.equal(
        tuned["backbone.layers.0.attn.qkv.weight"], pretrained["backbone.layers.0.attn.qkv.weight"]
    )


def test_each_registered_class_can_be_imported_from_its_package():
    own = [
        one
        for one in vars(mapet_mm.registry).values()
        if getattr(one, "scope", "") == mapet_mm.registry.SCOPE
    ]
    for registry in own:
        registry.import_from_location()
    known = {name: kind for one in own for name, kind in one.module_dict.items() if isinstance(kind, type)}
    # Tests register classes of their own.
    known = {name: kind for name, kind in known.items() if kind.__module__.startswith("mapet_mm.")}
    assert {"MaPeT", "LoadTokenGrid", "NonFiniteHook"} <= known.keys()
    names = ("models", "tokenizers", "datasets", "engine", "evaluation.metrics")
    packages = [importlib.import_module(f"mapet_mm.{name}") for name in names]
    for name, kind in known.items():
        assert any(getattr(package, name, None) is kind for package in packages), name


@pytest.mark.parametrize("kind", ["Pretrained", "mmengine.model.PretrainedInit", PretrainedInit])
def test_weights_are_found_however_their_initialiser_is_given(kind):
    init_cfg = [dict(type="TruncNormal"), dict(type=kind, checkpoint="vqkd.pth")]
    config, checkpoint = split_checkpoint(dict(type=VQKD, init_cfg=init_cfg))
    assert config == dict(type=VQKD)
    assert checkpoint["checkpoint"] == "vqkd.pth"
