"""What a run starts from: its own last whole checkpoint, read safely; and what it writes can be read so."""

import json
import shutil
import warnings
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import CheckpointHook
from mmengine.logging import HistoryBuffer
from mmengine.model import PretrainedInit
from mmengine.runner import Runner, load_checkpoint
from safetensors.torch import save_file
from tiny_training import CONFIG, read_checkpoint, read_scalars, run_tool, second_of_its_own

from mapet_mm.engine.hooks.portable_checkpoint_hook import PortableCheckpointHook
from mapet_mm.engine.runners.build_runner import build_runner
from mapet_mm.engine.runners.launch import configure_test, configure_training, load_config
from mapet_mm.engine.runners.resume import (
    LaunchError,
    differences,
    find_checkpoint,
    recipe,
    require_checkpoint,
)

pytestmark = pytest.mark.usefixtures("one_thread")
BEST = ["default_hooks.checkpoint.save_best=auto"]


class Foreign:
    """An object of somebody's own class in a checkpoint."""


def build(cfg: Config) -> Runner:
    with second_of_its_own():
        return build_runner(cfg, "none")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, images) -> tuple[Path, Path]:
    """Config and work dir of a run of two epochs that keeps its best checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    config = folder / "trained.py"
    config.write_text(CONFIG.replace("DATA", str(images)))
    cfg = load_config(str(config), {BEST[0].split("=")[0]: "auto"}, str(folder / "work"))
    configure_training(cfg)
    build(cfg).train()
    return config, folder / "work"


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    """The work dir of the run, copied: `last_checkpoint` still names the original's files."""
    return Path(shutil.copytree(trained[1], tmp_path / "copy"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def find(work: Path) -> str | None:
    return find_checkpoint(Config(dict(work_dir=str(work))))


# --- what is written -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["epoch_1.pth", "epoch_2.pth", "best_accuracy_top1_epoch_1.pth"])
def test_what_is_written_is_read_with_weights_only_and_nothing_allowed(trained, name):
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        content = torch.load(trained[1] / name, weights_only=True)
    finally:
        torch.serialization.add_safe_globals(before)
    assert content["meta"]["epoch"] == int(name[-5])
    assert content["message_hub"]["runtime_info"]["best_score"] == 100.0


def test_numpy_values_are_plain_and_equal(tmp_path):
    content = {
        "message_hub": {"runtime_info": {"score": np.float32(0.5), "n": np.int64(3), "s": np.str_("a")}},
        "meta": {"palette": np.arange(3, dtype=np.uint8), "where": Path("x"), "pair": (np.bool_(True), 1)},
        "param_schedulers": [{"_last_value": [np.float64(1e-3)], "kind": IntEnum("Kind", "A").A}],
    }
    PortableCheckpointHook().before_save_checkpoint(None, content)
    torch.save(content, tmp_path / "plain.pth")
    assert torch.load(tmp_path / "plain.pth", weights_only=True) == {
        "message_hub": {"runtime_info": {"score": 0.5, "n": 3, "s": "a"}},
        "meta": {"palette": [0, 1, 2], "where": "x", "pair": (True, 1)},
        "param_schedulers": [{"_last_value": [1e-3], "kind": 1}],
    }


@pytest.mark.parametrize("options", [{"backend_args": {"backend": "petrel"}}, {"out_dir": "s3://bucket"}])
def test_checkpoints_that_go_elsewhere_are_left_to_their_own_storage(options, tmp_path):
    hook = CheckpointHook(**{"out_dir": str(tmp_path), **options})
    before = hook.backend_args
    PortableCheckpointHook().before_train(SimpleNamespace(hooks=[hook], work_dir=str(tmp_path)))
    assert hook.backend_args == before


def test_what_cannot_be_plain_is_named(capture_log):
    """It is kept, for those who trust the file."""
    content = {"meta": {"mine": Foreign()}}
    PortableCheckpointHook().before_save_checkpoint(None, content)
    assert isinstance(content["meta"]["mine"], Foreign)
    assert "the checkpoint holds Python objects (meta.mine): --resume will need --trust" in capture_log()


def test_saving_leaves_the_runs_own_log_buffers_alone(trained, tmp_path):
    cfg = load_config(str(trained[0]), None, str(tmp_path / "work"))
    configure_training(cfg)
    runner = build(cfg)
    runner.train()
    assert isinstance(runner.message_hub.get_scalar("train/loss"), HistoryBuffer)


def test_log_buffers_come_back_when_a_run_resumes(trained, tmp_path):
    """Losses of the first epoch's four iterations, then of the second's; the log has their running means."""
    config, work = trained
    cfg = load_config(str(config), None, str(tmp_path / "resumed"))
    configure_training(cfg, resume=str(work / "epoch_1.pth"))
    runner = build(cfg)
    runner.train()
    values, counts = runner.message_hub.get_scalar("train/loss").data
    whole = [line["loss"] for line in read_scalars(work) if "loss" in line]
    np.testing.assert_allclose(np.cumsum(values) / np.arange(1, 9), whole, rtol=1e-4)
    assert counts.tolist() == [1] * 8


def test_a_resumed_copy_never_removes_the_originals_best_checkpoint(trained, copy):
    cfg = load_config(str(trained[0]), {BEST[0].split("=")[0]: "auto"}, str(copy))
    configure_training(cfg, resume=str(copy / "epoch_1.pth"))
    runner = build(cfg)
    runner.train()
    assert runner.message_hub.get_info("best_ckpt") == str(copy / "best_accuracy_top1_epoch_1.pth")
    assert runner.message_hub.get_info("last_ckpt") == str(copy / "epoch_2.pth")


# --- what is read ----------------------------------------------------------------------------------------


def test_checkpoints_of_before_are_read_without_a_warning(tmp_path, capsys):
    """Log buffers and NumPy's numbers of any type, as MMEngine alone writes them."""
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


@pytest.mark.parametrize("how", ["resume", "load_from", "init_cfg", "test"])
def test_a_file_with_foreign_objects_is_refused_with_the_way_to_convert_it(config, tmp_path, how):
    path = tmp_path / "foreign.pth"
    torch.save({"state_dict": {}, "meta": Foreign()}, path)
    options = {
        "resume": ({}, dict(resume=str(path))),
        "load_from": (dict(load_from=str(path)), {}),
        "init_cfg": (
            {"model.backbone.init_cfg": [dict(type=PretrainedInit, checkpoint=str(path))]},
            {},
        ),
        "test": ({}, dict(checkpoint=str(path))),
    }
    cfg_options, kwargs = options[how]
    configure = configure_test if how == "test" else configure_training
    cfg = load_config(str(config), cfg_options, str(tmp_path / "work"))
    match = rf"test_checkpoints.Foreign.*convert.py mm mm {path} weights.pth.*--trust-checkpoint"
    with pytest.raises(LaunchError, match=match) as raised:
        configure(cfg, **kwargs)
    assert "\n" not in str(raised.value)
    configure(load_config(str(config), cfg_options, str(tmp_path / "work")), **kwargs, trust_checkpoint=True)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"no checkpoint at all"])
def test_a_file_that_is_no_checkpoint_is_one_line(tmp_path, content):
    path = tmp_path / "broken.pth"
    path.write_bytes(content)
    with pytest.raises(LaunchError, match=rf"^`load_from`: {path} is truncated, or no checkpoint") as raised:
        require_checkpoint("`load_from`:", str(path), trust=True)
    assert "\n" not in str(raised.value)


def test_the_last_checkpoint_is_not_passed_over_for_what_it_holds(copy):
    """It is whole: going on from the one before would train an epoch again without a word."""
    content = torch.load(copy / "epoch_2.pth", weights_only=False)
    torch.save(content | {"mine": Foreign()}, copy / "epoch_2.pth")
    with pytest.raises(LaunchError, match=r"epoch_2\.pth .*--trust"):
        find(copy)
    assert find_checkpoint(Config(dict(work_dir=str(copy))), trust=True) == str(copy / "epoch_2.pth")


def test_of_several_processes_one_speaks_before_there_is_a_log(copy, capsys, monkeypatch):
    truncate(copy / "epoch_2.pth")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert find(copy) == str(copy / "epoch_1.pth")
    assert not capsys.readouterr().err


@pytest.mark.parametrize("content", ["a folder", "no recipe", "broken"])
def test_where_a_recipe_is_not_known_nothing_differs(content, tmp_path):
    path = tmp_path / "last.pth"
    if content == "a folder":  # DeepSpeed's
        path.mkdir()
    elif content == "no recipe":
        torch.save({"meta": {}}, path)
    else:
        path.write_bytes(b"PK")
    assert differences({"model": "a"}, str(path)) == []


@pytest.mark.parametrize("kind", ["pth", "safetensors"])
def test_a_training_from_other_weights_of_the_same_name_is_another_one(kind, tmp_path):
    """In a list too. Not so a file that is gone since, or that an earlier version did not write down."""
    weights, last = tmp_path / f"weights.{kind}", tmp_path / "last.pth"
    save = save_file if kind == "safetensors" else torch.save
    init_cfg = [dict(type="Constant", val=1.0), dict(type="Pretrained", checkpoint=str(weights))]
    cfg = Config(dict(model=dict(backbone=dict(init_cfg=init_cfg)), name="epoch_1.pth"))
    save({"a": torch.ones(3)}, weights)
    torch.save({"meta": {"recipe": recipe(cfg)}}, last)
    assert differences(recipe(cfg), str(last)) == []
    save({"a": torch.tensor([1.0, 1.0, 2.0])}, weights)
    assert differences(recipe(cfg), str(last)) == [f"content of {weights}"]
    weights.unlink()
    assert differences(recipe(cfg), str(last)) == []
    torch.save({"meta": {"recipe": recipe(cfg)}}, last)
    save({"a": torch.ones(3)}, weights)
    assert differences(recipe(cfg), str(last)) == []


def test_safetensors_are_refused_with_the_way_to_convert_them(tmp_path):
    path = tmp_path / "my weights.safetensors"
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(
        LaunchError, match=rf"{path} holds safetensors.*convert.py mm mm '{path}' weights.pth` .*`timm mm`"
    ):
        require_checkpoint("checkpoint", str(path), trust=True)


def test_a_test_ignores_that_its_config_resumes(trained, tmp_path):
    cfg = load_config(str(trained[0]), dict(resume=True), str(tmp_path))
    configure_test(cfg, str(trained[1] / "epoch_2.pth"))
    assert build(cfg).test()["accuracy/top1"] == 100.0


def test_a_work_dir_is_no_checkpoint(trained):
    with pytest.raises(LaunchError, match=rf"{trained[1]} is a work dir: name a file in it, or --work-dir"):
        require_checkpoint("checkpoint", str(trained[1]))


# --- which one -------------------------------------------------------------------------------------------


def test_a_copied_run_resumes_from_its_own_checkpoint(copy):
    assert find(copy) == str(copy / "epoch_2.pth")


def test_a_run_moved_without_the_record_resumes_from_its_newest_checkpoint(copy):
    (copy / "last_checkpoint").unlink()
    shutil.copy(copy / "epoch_2.pth", copy / "epoch_10.pth")
    assert find(copy) == str(copy / "epoch_10.pth")


def test_checkpoints_later_than_the_record_are_of_another_run(copy):
    shutil.copy(copy / "epoch_2.pth", copy / "epoch_10.pth")
    assert find(copy) == str(copy / "epoch_2.pth")


def test_a_truncated_checkpoint_is_passed_over_with_its_name(copy, capsys):
    truncate(copy / "epoch_2.pth")
    assert find(copy) == str(copy / "epoch_1.pth")
    said = capsys.readouterr().err
    assert f"warning: checkpoint {copy / 'epoch_2.pth'} is truncated" in said
    assert "trying the one before" in said


def test_a_missing_checkpoint_is_passed_over_with_its_name(copy, capsys):
    (copy / "epoch_2.pth").unlink()
    assert find(copy) == str(copy / "epoch_1.pth")
    assert f"warning: checkpoint {copy / 'epoch_2.pth'} does not exist" in capsys.readouterr().err


def test_no_whole_checkpoint_is_one_line(copy):
    for epoch in (1, 2):
        truncate(copy / f"epoch_{epoch}.pth")
    with pytest.raises(LaunchError, match=rf"^no checkpoint in {copy} is whole: remove the folder"):
        find(copy)


def test_a_folder_without_checkpoints_starts_from_the_beginning(tmp_path):
    assert find(tmp_path) is None
    assert find(tmp_path / "gone") is None


def test_checkpoints_are_found_where_the_hook_writes_them(copy, tmp_path):
    """With `out_dir`, in a folder of the work dir's name there; names as in `filename_tmpl`."""
    work = tmp_path / "elsewhere" / "copy"
    work.mkdir(parents=True)
    (copy / "epoch_1.pth").rename(copy / "step-7.ckpt")
    hook = dict(type="CheckpointHook", out_dir=str(tmp_path), filename_tmpl="step-{}.ckpt")
    cfg = Config(dict(work_dir=str(work), default_hooks=dict(checkpoint=hook)))
    assert find_checkpoint(cfg) == str(copy / "step-7.ckpt")


# --- going on --------------------------------------------------------------------------------------------


def test_the_same_command_goes_on_where_it_was_stopped(trained, copy, monkeypatch, capsys):
    """Stopped after its first epoch, the run starts with the second; nothing is trained twice."""
    (copy / "epoch_2.pth").unlink()
    first = (copy / "epoch_1.pth").stat().st_mtime_ns
    run_tool(monkeypatch, "train", trained[0], "--work-dir", copy, "--cfg-options", *BEST)
    captured = capsys.readouterr()
    assert f"going on from {copy / 'epoch_1.pth'}" in captured.err
    assert {line["epoch"] for line in read_scalars(copy) if "loss" in line} == {2}
    assert (copy / "epoch_1.pth").stat().st_mtime_ns == first
    expected = read_checkpoint(trained[1], 2)["state_dict"]
    for name, value in read_checkpoint(copy, 2)["state_dict"].items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


def test_another_configs_training_is_not_overwritten(trained, copy, monkeypatch):
    changed = ["optim_wrapper.optimizer.lr=0.5", *BEST]
    with pytest.raises(SystemExit, match=r"another config \(`optim_wrapper` differ\).*--work-dir.*--resume"):
        run_tool(monkeypatch, "train", trained[0], "--work-dir", copy, "--cfg-options", *changed)


def test_resume_goes_on_whatever_the_config_and_says_what_differs(trained, copy, monkeypatch, capsys):
    options = ["train_cfg.max_epochs=3", *BEST]
    run_tool(monkeypatch, "train", trained[0], "--work-dir", copy, "--resume", "--cfg-options", *options)
    assert "`train_cfg` of the config differ" in capsys.readouterr().err
    assert read_checkpoint(copy, 3)["meta"]["iter"] == 12


def test_where_it_runs_and_how_it_loads_make_no_other_config(trained, copy):
    options = {"train_dataloader.num_workers": 1, "log_level": "WARNING", BEST[0].split("=")[0]: "auto"}
    cfg = load_config(str(trained[0]), options, str(copy))
    configure_training(cfg)
    assert (cfg.resume, cfg.load_from) == (True, str(copy / "epoch_2.pth"))


def test_weights_to_start_from_make_another_config(trained, copy, tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "weights.pth")
    options = {"load_from": str(tmp_path / "weights.pth"), BEST[0].split("=")[0]: "auto"}
    with pytest.raises(LaunchError, match=r"\(`load_from` differ\)"):
        configure_training(load_config(str(trained[0]), options, str(copy)))


def test_checkpoints_that_a_run_will_write_again_are_named(trained, copy, tmp_path, capsys):
    """From an earlier one of its own, and from one of another folder; not from its own last."""
    for work, resume, expected in (
        (copy, copy / "epoch_1.pth", "epoch_2.pth"),
        (copy, trained[1] / "epoch_2.pth", "epoch_1.pth, epoch_2.pth"),
        (copy, copy / "epoch_2.pth", None),
        (tmp_path / "new", copy / "epoch_2.pth", None),
    ):
        configure_training(load_config(str(trained[0]), None, str(work)), resume=str(resume))
        said = capsys.readouterr().err
        assert (f"holds {expected}, which this run writes again" if expected else "") in said
        assert ("again" in said) == bool(expected)


@pytest.mark.parametrize("resume", ["True", "path"])
def test_resume_in_the_config_is_the_option(trained, copy, resume):
    """`resume = True` alone is MMEngine's way to go on from the last; with `load_from`, from that one."""
    options = {"resume": True, "train_cfg.max_epochs": 3}
    if resume == "path":
        options["load_from"] = str(copy / "epoch_1.pth")
    cfg = load_config(str(trained[0]), options, str(copy))
    configure_training(cfg)
    expected = copy / ("epoch_1.pth" if resume == "path" else "epoch_2.pth")
    assert (cfg.resume, cfg.load_from) == (True, str(expected))


def test_test_writes_what_it_measured_and_does_not_name_itself_next(trained, tmp_path, monkeypatch, capsys):
    config, work = trained
    out = tmp_path / "metrics.json"
    run_tool(monkeypatch, "test", config, work / "epoch_2.pth", "--work-dir", tmp_path, "--out", out)
    assert json.loads(out.read_text())["accuracy/top1"] == 100.0
    assert "tools/test.py" not in capsys.readouterr().out
