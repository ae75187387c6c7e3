"""The recipe by which trainings are told apart: what is another training, and what goes on as the same."""

import pytest
import torch
from config_building import run_tool
from mmengine.config import Config
from safetensors.torch import save_file
from trainings import read_scalars

from mapet_mm.engine.runners.launch import configure_training, load_config
from mapet_mm.engine.runners.recipe import config_digests, differences, recorded_digests
from mapet_mm.utils.errors import LaunchError


class Foreign:
    """An object of somebody's own class in a checkpoint."""


def test_another_configs_training_is_not_overwritten_unless_asked(trained, copy, tmp_path, capsys):
    def start(changed: dict, resume: str | None = None) -> Config:
        cfg = load_config(str(trained.config), changed, str(copy))
        configure_training(cfg, resume)
        return cfg

    weights = tmp_path / "weights.pth"
    torch.save({"state_dict": {}}, weights)
    for changed in ({"optim_wrapper.optimizer.lr": 0.5}, {"load_from": str(weights)}):
        name = next(iter(changed)).partition(".")[0]
        with pytest.raises(LaunchError, match=rf"`{name}`.* differ\): another --work-dir .*--resume"):
            start(changed)
    cfg = start({"train_cfg.max_epochs": 3}, resume="auto")
    assert (cfg.resume, cfg.load_from) == (True, str(copy / "epoch_2.pth"))
    assert "; `train_cfg` differ, and the learning rate is the config's at that" in capsys.readouterr().err
    # Where it runs, how it loads, and an entry that says nothing.
    start({"train_dataloader.num_workers": 1, "log_level": "WARNING", "load_from": None})


LONGER = ["--cfg-options", "train_cfg.max_epochs=4"]
OTHER_RATES = {
    "more epochs": [*LONGER, "param_scheduler.0.T_max=8"],
    "more iterations": [*LONGER, "param_scheduler.0.T_max=8", "param_scheduler.0.by_epoch=False"],
    "another rate": [*LONGER, "optim_wrapper.optimizer.lr=0.03"],
    "scaled to the batch": ["--auto-scale-lr", *LONGER],
}


@pytest.mark.parametrize("changed", OTHER_RATES.values(), ids=OTHER_RATES)
def test_a_run_that_goes_on_with_other_rates_has_them_from_there_on(
    copy, trained, tmp_path, monkeypatch, changed
):
    for work, resume in ((tmp_path / "at once", []), (copy, ["--resume"])):
        options = ["--work-dir", work, *resume, *changed]
        run_tool(monkeypatch, "train.py", trained.config, *options)
    whole, resumed = (
        {line["step"]: line["lr"] for line in read_scalars(work) if line.get("epoch", 0) > 2}
        for work in (tmp_path / "at once", copy)
    )
    assert resumed == pytest.approx(whole, rel=1e-6)
    assert len(set(whole.values())) > 1


@pytest.mark.parametrize("kind", ["pth", "safetensors"])
def test_a_training_from_other_weights_of_the_same_name_is_another_one(kind, tmp_path):
    weights, last = tmp_path / f"weights.{kind}", tmp_path / "last.pth"
    save = save_file if kind == "safetensors" else torch.save
    init_cfg = [dict(type="Constant", val=1.0), dict(type="Pretrained", checkpoint=str(weights))]
    cfg = Config(dict(model=dict(backbone=dict(init_cfg=init_cfg)), name="epoch_1.pth"))
    save({"a": torch.ones(3)}, weights)
    torch.save({"meta": {"epoch": 1, "recipe": config_digests(cfg)}}, last)
    assert differences(config_digests(cfg), recorded_digests(str(last))) == []
    save({"a": torch.tensor([1.0, 1.0, 2.0])}, weights)
    assert differences(config_digests(cfg), recorded_digests(str(last))) == [f"content of {weights}"]
    torch.save({"meta": {"epoch": 1}}, last)  # of MMEngine alone
    assert differences(config_digests(cfg), recorded_digests(str(last))) == []
    torch.save({"meta": {"epoch": 1}, "mine": Foreign()}, last)
    with pytest.raises(LaunchError, match="Foreign"):
        recorded_digests(str(last))
    assert differences(config_digests(cfg), recorded_digests(str(last), trust=True)) == []


@pytest.mark.parametrize("fused", [True, False])
def test_a_training_goes_on_with_another_kernel_of_its_optimizer(copy, trained, fused):
    """And stays the same training, also for its learning rate's curve."""
    began = torch.load(copy / "epoch_2.pth", weights_only=True)["meta"]["recipe"]
    cfg = load_config(str(trained.config), {"optim_wrapper.optimizer.fused": fused}, str(copy))
    configure_training(cfg)
    assert cfg.resume
    assert cfg.default_hooks.portable_checkpoint.recipe["optim_wrapper"] == began["optim_wrapper"]
    options = {"optim_wrapper.optimizer.fused": fused, "optim_wrapper.optimizer.weight_decay": 0.06}
    with pytest.raises(LaunchError, match="`optim_wrapper` differ"):
        configure_training(load_config(str(trained.config), options, str(copy)))


def test_a_classifiers_preprocessor_is_another_only_if_its_numbers_are():
    """What recipes say since they do not wait for labels is what they said nothing of before."""
    numbers = dict(num_classes=3, mean=[1.0] * 3, std=[2.0] * 3)
    kinds = ({}, dict(type="mapet_mm.ClsDataPreprocessor"), dict(type="mapet_mm.TokenGridDataPreprocessor"))
    before, now, other = (
        config_digests(Config(dict(data_preprocessor={**kind, **numbers}))) for kind in kinds
    )
    assert now == before != other
