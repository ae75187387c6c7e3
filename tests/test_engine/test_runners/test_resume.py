"""The checkpoint that a run starts from: its own last whole one, read safely, of the same training."""

import shutil
import warnings
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import pytest
import torch
from config_building import run_tool
from mmengine.config import Config
from mmengine.logging import HistoryBuffer
from mmengine.model import PretrainedInit
from mmengine.runner import load_checkpoint
from safetensors.torch import save_file
from trainings import read_checkpoint, read_scalars

from mapet_mm import weight_files
from mapet_mm.engine.runners.launch import configure_test, configure_training, load_config
from mapet_mm.engine.runners.resume import (
    BrokenCheckpointError,
    LaunchError,
    check_pretrained,
    check_start_names,
    check_weights,
    find_checkpoint,
    require_checkpoint,
)
from mapet_mm.registry import MODELS
from mapet_mm.utils.config import nodes
from mapet_mm.weight_files import write_weights


class Foreign:
    """An object of somebody's own class in a checkpoint."""


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def find(work: Path) -> str | None:
    return find_checkpoint(Config(dict(work_dir=str(work))))


def test_checkpoints_of_mmengine_alone_are_read_without_a_warning(tmp_path, capsys):
    """With its log buffers, and NumPy's numbers of any type."""
    old = {
        "state_dict": {"weight": torch.ones(1, 1)},
        "message_hub": {
            "log_scalars": {"train/loss": HistoryBuffer([1.0], [1])},
            "runtime_info": {"a": np.float32(1), "b": np.int32(1), "c": np.ones(2, np.float16)},
        },
    }
    torch.save(old, tmp_path / "old.pth")
    require_checkpoint("checkpoint", str(tmp_path / "old.pth"))
    linear = torch.nn.Linear(1, 1, bias=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(linear, str(tmp_path / "old.pth"), map_location="cpu")
    captured = capsys.readouterr()
    assert "Could not safely load" not in captured.out + captured.err
    assert linear.weight.item() == 1


# Options of the config and of the tool that name a checkpoint.
ROADS = {
    "resume": lambda path: ({}, dict(resume=path)),
    "load_from": lambda path: (dict(load_from=path), {}),
    "init_cfg": lambda path: (
        {"model.backbone.init_cfg": [dict(type=PretrainedInit, checkpoint=path)]},
        {},
    ),
    "pretrained": lambda path: ({"model.backbone.pretrained": path}, {}),
    "test": lambda path: ({}, dict(checkpoint=path)),
}


def configured(road: str, config: Path, path: str, work: Path, **kwargs) -> Config:
    """A config for which a tool was told to load a checkpoint on one of the roads."""
    options, named = ROADS[road](path)
    cfg = load_config(str(config), options, str(work))
    configure = configure_test if road == "test" else configure_training
    configure(cfg, **named, **kwargs)
    return cfg


@pytest.mark.parametrize("road", ROADS)
def test_a_file_with_foreign_objects_is_refused_unless_it_is_trusted(trained, tmp_path, road, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0")
    path = tmp_path / "foreign.pth"
    torch.save({"state_dict": {}, "meta": {"epoch": 1}, "mine": Foreign()}, path)
    with pytest.raises(LaunchError, match=r"Foreign.*--trust-checkpoint"):
        configured(road, trained.config, str(path), tmp_path / "work")
    configured(road, trained.config, str(path), tmp_path / "work", trust_checkpoint=True)
    load_checkpoint(torch.nn.Linear(1, 1), str(path), map_location="cpu")


@pytest.mark.parametrize("road", ROADS)
def test_a_checkpoint_at_an_address_is_fetched_and_read_as_safely_as_a_file(
    trained, tmp_path, road, monkeypatch
):
    """MMEngine's own loading of addresses runs whatever they hold."""
    foreign = tmp_path / "foreign.pth"
    torch.save({"state_dict": {}, "mine": Foreign()}, foreign)
    files = {"https://host/good.pth": trained.work / "epoch_2.pth", "https://host/foreign.pth": foreign}
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(weight_files, "download", lambda url, file: shutil.copy(files[url], file))
    with pytest.raises(LaunchError, match=r"Foreign.*--trust-checkpoint"):
        configured(road, trained.config, "https://host/foreign.pth", tmp_path / "work")
    with pytest.raises(LaunchError, match=r"http:.*https"):
        configured(road, trained.config, "http://host/good.pth", tmp_path / "work")
    cfg = configured(road, trained.config, "https://host/good.pth", tmp_path / "work")
    named = [one for _, one in nodes(cfg.to_dict()) if isinstance(one, str) and one.endswith("good.pth")]
    assert len(named) == 1
    assert Path(named[0]).read_bytes() == (trained.work / "epoch_2.pth").read_bytes()


def test_names_of_model_zoos_are_fetched_and_other_addresses_need_trust(trained, tmp_path, monkeypatch):
    addresses = []

    def download(address: str, file: str) -> None:
        addresses.append(address)
        shutil.copy(trained.work / "epoch_2.pth", file)

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(weight_files, "download", download)
    for name in ("torchvision://resnet18", "open-mmlab://vgg16_caffe"):
        assert Path(require_checkpoint("checkpoint", name)).is_file()
    assert [address.partition("://")[0] for address in addresses] == ["https", "https"]
    assert "resnet18" in addresses[0]
    with pytest.raises(LaunchError, match="--trust-checkpoint"):
        require_checkpoint("checkpoint", "s3://bucket/weights.pth")
    assert require_checkpoint("checkpoint", "s3://bucket/a.pth", trust=True) == "s3://bucket/a.pth"


def test_the_config_in_a_checkpoint_is_not_run(trained, copy, tmp_path, monkeypatch):
    """MMEngine runs `meta["config"]` when it resumes, a text, which safe reading lets through."""
    (copy / "epoch_2.pth").unlink()
    (copy / "last_checkpoint").write_text(str(copy / "epoch_1.pth"))
    content, canary = read_checkpoint(copy, 1), tmp_path / "canary"
    content["meta"]["config"] = f"open({str(canary)!r}, 'w').close()"
    torch.save(content, copy / "epoch_1.pth")
    run_tool(monkeypatch, "train.py", trained.config, "--work-dir", copy)
    assert (copy / "epoch_2.pth").is_file()
    assert not canary.exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"no checkpoint at all"])
def test_a_file_that_is_no_checkpoint_is_one_line(tmp_path, content):
    path = tmp_path / "broken.pth"
    path.write_bytes(content)
    with pytest.raises(BrokenCheckpointError, match=rf"^`load_from`: {path} is truncated, or no") as raised:
        require_checkpoint("`load_from`:", str(path), trust=True)
    assert "\n" not in str(raised.value)


def test_safetensors_and_work_dirs_are_refused_with_what_to_give_instead(trained, tmp_path):
    """Newer releases of PyTorch read safetensors (2.14 does, 2.11 does not), and MMEngine with them."""
    file = str(tmp_path / "weights.safetensors")
    save_file({"a": torch.ones(1)}, file)
    try:
        torch.load(file, weights_only=True)
    except UnpicklingError:
        reads_safetensors = False
    else:
        reads_safetensors = True
    if reads_safetensors:
        assert require_checkpoint("checkpoint", file) == file
    else:
        with pytest.raises(LaunchError, match=r"safetensors.*convert mm mm"):
            require_checkpoint("checkpoint", file)
    with pytest.raises(LaunchError, match="IsADirectory"):
        require_checkpoint("checkpoint", str(trained.work))


def test_weights_alone_are_no_training_that_goes_on(trained, tmp_path):
    weights = tmp_path / "weights.pth"
    torch.save({"state_dict": read_checkpoint(trained.work, 2)["state_dict"], "meta": {}}, weights)
    cfg = load_config(str(trained.config), work_dir=str(tmp_path / "work"))
    with pytest.raises(
        LaunchError, match=rf"{weights} has no training that could go on.*load_from={weights}"
    ):
        configure_training(cfg, str(weights))


def test_a_copied_run_resumes_from_its_own_checkpoint_and_not_from_a_later_one_of_another_run(copy):
    shutil.copy(copy / "epoch_2.pth", copy / "epoch_10.pth")
    assert find(copy) == str(copy / "epoch_2.pth")


def test_a_run_starts_anew_only_if_there_is_no_record_of_a_checkpoint(copy, tmp_path):
    """MMEngine writes the record in place: a full disk leaves an empty one."""
    assert find(tmp_path / "none") is None
    (copy / "last_checkpoint").write_text("")
    with pytest.raises(LaunchError, match=r"last_checkpoint is empty"):
        find(copy)


@pytest.mark.parametrize("damage", [truncate, Path.unlink])
def test_a_damaged_last_checkpoint_is_named(trained, copy, damage):
    damage(copy / "epoch_2.pth")
    with pytest.raises(BrokenCheckpointError, match=r"^last checkpoint .*epoch_2\.pth"):
        configure_training(load_config(str(trained.config), None, str(copy)))


def test_the_last_checkpoint_is_not_run_for_what_it_holds(trained, copy):
    content = torch.load(copy / "epoch_2.pth", weights_only=False)
    torch.save(content | {"mine": Foreign()}, copy / "epoch_2.pth")
    with pytest.raises(LaunchError, match=r"epoch_2\.pth .*--trust"):
        configure_training(load_config(str(trained.config), None, str(copy)))


def test_the_same_command_goes_on_where_it_was_stopped(trained, copy, monkeypatch, capsys):
    (copy / "epoch_2.pth").unlink()
    (copy / "last_checkpoint").write_text(str(copy / "epoch_1.pth"))
    first = (copy / "epoch_1.pth").stat().st_mtime_ns
    run_tool(monkeypatch, "train.py", trained.config, "--work-dir", copy)
    assert f"going on from {copy / 'epoch_1.pth'}" in capsys.readouterr().err
    assert {line["epoch"] for line in read_scalars(copy) if "loss" in line} == {2}
    assert (copy / "epoch_1.pth").stat().st_mtime_ns == first
    expected, resumed = read_checkpoint(trained.work, 2), read_checkpoint(copy, 2)
    for name, value in resumed["state_dict"].items():
        torch.testing.assert_close(value, expected["state_dict"][name], rtol=0, atol=1e-6)
    assert resumed["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]


@pytest.mark.parametrize("source", ["last", "named", "none"])
def test_resume_in_the_config_is_the_option(trained, copy, tmp_path, source):
    """`resume = True` alone is MMEngine's way to go on from the last; with `load_from`, from that one."""
    weights = tmp_path / "weights.pth"
    torch.save({"state_dict": {}}, weights)
    options = {"resume": True, "train_cfg.max_epochs": 3}
    expected = True, str(copy / "epoch_2.pth")
    if source == "named":
        options["load_from"] = str(copy / "epoch_1.pth")
        expected = True, options["load_from"]
    elif source == "none":
        options, copy, expected = dict(load_from=str(weights)), tmp_path / "empty", (False, str(weights))
    cfg = load_config(str(trained.config), options, str(copy))
    configure_training(cfg, "auto" if source == "none" else None)
    assert (cfg.resume, cfg.load_from) == expected


@pytest.mark.parametrize(
    ("saved", "prefix", "taken"),
    [
        ("backbone.", "backbone.", "backbone."),
        ("backbone.", "backbone", "backbone"),  # as the config has it, which tells trainings apart
        ("module.backbone.", "backbone.", "module.backbone."),
        ("_orig_mod.backbone.", "backbone.", "_orig_mod.backbone."),
        ("module.backbone._orig_mod.", "backbone", "module.backbone._orig_mod."),
        ("_orig_mod.", None, "_orig_mod."),
    ],
)
def test_weights_inside_a_wrapper_are_loaded_as_without_it(saved, prefix, taken, tmp_path):
    arch = dict(embed_dims=24, num_layers=1, num_heads=3, feedforward_channels=48)
    backbone = dict(type="mapet_mm.MaPeTViT", arch=arch, img_size=32, patch_size=8)
    weights = {
        name: torch.full_like(value, 0.3) for name, value in MODELS.build(backbone).state_dict().items()
    }
    torch.save({"state_dict": {saved + name: value for name, value in weights.items()}}, tmp_path / "w.pth")
    backbone["init_cfg"] = dict(type="Pretrained", checkpoint=str(tmp_path / "w.pth"), prefix=prefix)
    cfg = Config(dict(model=dict(backbone=backbone)))
    check_pretrained(cfg)
    assert cfg.model.backbone.init_cfg.prefix == taken
    vit = MODELS.build(cfg.model.backbone)
    vit.init_weights()
    assert all(torch.equal(value, weights[name]) for name, value in vit.state_dict().items())


@pytest.mark.parametrize(
    ("saved", "line"),
    [
        (
            "model.backbone.",
            "under `model.backbone.`: --cfg-options model.backbone.init_cfg.prefix=model.backbone.",
        ),
        ("", "`cls_token`, `pos_embed`: --cfg-options model.backbone.init_cfg.prefix=PREFIX, or None"),
    ],
)
def test_a_prefix_that_the_file_lacks_is_one_line_with_those_that_it_has(saved, line, tmp_path):
    weights = {saved + name: torch.ones(1) for name in ("cls_token", "pos_embed")}
    torch.save({"state_dict": weights}, tmp_path / "w.pth")
    init_cfg = dict(type="Pretrained", checkpoint=str(tmp_path / "w.pth"), prefix="backbone.")
    with pytest.raises(LaunchError, match=f"nothing under `backbone.`, but {line}"):
        check_pretrained(Config(dict(model=dict(backbone=dict(init_cfg=init_cfg)))))


def test_a_compiled_models_checkpoint_is_one_of_the_model():
    model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    weights = {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}
    checkpoint = {"state_dict": dict(weights)}
    check_weights(model, checkpoint)
    assert checkpoint["state_dict"].keys() == model.state_dict().keys()
    compiled = torch.nn.Module()
    compiled._orig_mod = model
    checkpoint = {"state_dict": dict(weights)}
    check_weights(compiled, checkpoint)  # whose own names have it
    assert checkpoint["state_dict"].keys() == weights.keys()
    augmented = torch.nn.Module()
    augmented.module = model  # MMEngine loads into this
    check_weights(augmented, checkpoint)
    assert checkpoint["state_dict"].keys() == model.state_dict().keys()


TIMM = dict(type="mmpretrain.TIMMBackbone", model_name="vit_small_patch16_dinov3")
EPOCH = dict(type="Pretrained", checkpoint="RUN/training/epoch_1.pth", prefix="backbone.")


@pytest.mark.parametrize(
    "backbone",
    [
        dict(TIMM, features_only=True, init_cfg=EPOCH),
        dict(TIMM, features_only=True, init_cfg=dict(EPOCH, prefix="backbone.timm_model.")),
        dict(TIMM, init_cfg=dict(EPOCH, prefix="backbone.timm_model")),
        dict(TIMM, features_only=True, checkpoint_path="RUN/timm/model.safetensors"),
        dict(TIMM, checkpoint_path="RUN/timm/model.safetensors"),
    ],
)
def test_weights_that_mmpretrains_backbone_of_timm_cannot_take_are_refused(backbone, tmp_path, monkeypatch):
    """The first two would train on from random weights, with a line in the log."""
    monkeypatch.chdir(tmp_path)
    weights = {"backbone.timm_model.blocks.0.norm1.weight": torch.zeros(1)}
    write_weights(tmp_path / "RUN/training/epoch_1.pth", weights)
    write_weights(tmp_path / "RUN/timm/model.safetensors", weights)
    (tmp_path / "RUN/timm/config.json").write_text("{}")
    cfg = Config(dict(model=dict(type="mmseg.EncoderDecoder", backbone=backbone)))
    with pytest.raises(LaunchError, match=r"^`model.backbone.*type=\"mapet_mm.TIMMViT\"") as raised:
        check_pretrained(cfg)
    assert "\n" not in str(raised.value)
    # What it can take, and another library's names, are let through.
    check_pretrained(
        Config(dict(model=dict(type="mmseg.EncoderDecoder", backbone=dict(TIMM, init_cfg=EPOCH))))
    )


SMALL = dict(embed_dims=8, num_layers=1, num_heads=1, feedforward_channels=8)
PLAIN = dict(type="mmpretrain.VisionTransformer", arch=SMALL, img_size=8, patch_size=4)


@pytest.mark.parametrize(
    ("backbone", "prefix", "saved", "line"),
    [
        (
            PLAIN,
            None,
            "blocks.0.norm1.weight",
            "no weight of the model's `backbone`: it has `blocks.*TIMMViT",
        ),
        (
            PLAIN,
            "a.",
            "a.encoder.layer.0.bias",
            "`encoder.*, the VisionTransformer `cls_token`.*convert",
        ),
        (PLAIN, "a.", "a.layers.0.ln1.weight", None),
        (PLAIN, None, "module.cls_token", None),
        (dict(type="mapet_mm.MaPeTViT", arch=SMALL, img_size=8, patch_size=4), None, "blocks.0.a", None),
    ],
)
def test_a_start_with_no_weight_of_the_part_is_refused(backbone, prefix, saved, line, tmp_path):
    """MMEngine would log the names and train from random weights; this package's parts say so themselves."""
    write_weights(tmp_path / "w.pth", {saved: torch.zeros(1)})
    init_cfg = dict(type="Pretrained", checkpoint=str(tmp_path / "w.pth"), prefix=prefix)
    model = torch.nn.ModuleDict(dict(backbone=MODELS.build(dict(backbone, init_cfg=init_cfg))))
    if line is None:
        check_start_names(model)
    else:
        with pytest.raises(LaunchError, match=line):
            check_start_names(model)
