"""A pre-training checkpoint goes downstream with `load_from` alone, or with `init_cfg` alone."""

from pathlib import Path

import pytest
import torch
from config_building import ROOT
from mmengine.config import Config
from mmengine.runner import Runner
from mmengine.runner.checkpoint import save_checkpoint

from mapet_mm.engine.runners.launch import configure_training, load_config
from mapet_mm.registry import MODELS
from mapet_mm.utils.errors import UserError

CONFIGS = ROOT / "configs" / "micro"
PRETRAINING = next(CONFIGS.glob("mapet_vit-micro_kclip_*.py"))
FINE_TUNING = CONFIGS / "vit-micro_1xb64-coslr.py"
UPERNET = next(CONFIGS.glob("vit-micro_upernet_*.py"))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    path = tmp_path_factory.mktemp("weights") / "pretrained.pth"
    model = MODELS.build(Config.fromfile(PRETRAINING).model)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    save_checkpoint({"state_dict": model.state_dict()}, str(path))
    return path, model.state_dict()


def start(recipe: Path, options: dict, work_dir: Path) -> tuple[Runner, str]:
    """The runner with its weights in place, as training starts, and what it logged."""
    config = load_config(str(recipe), options, str(work_dir))
    configure_training(config)
    for loop in ("train", "val", "test"):
        config.pop(f"{loop}_dataloader"), config.pop(f"{loop}_cfg"), config.pop(f"{loop}_evaluator", None)
    config.pop("optim_wrapper"), config.pop("param_scheduler")
    config.experiment_name = str(work_dir)
    runner = Runner.from_cfg(config)
    runner.model.init_weights()
    runner.load_or_resume()
    return runner, next(work_dir.glob("*/*.log")).read_text()


@pytest.mark.parametrize("way", ["load_from", "model.backbone.init_cfg.checkpoint"])
@pytest.mark.parametrize(("recipe", "side"), [(FINE_TUNING, 24), (UPERNET, 48)], ids=["cls", "seg"])
def test_backbone_is_taken_over_and_the_rest_reported(recipe, side, way, pretrained, tmp_path, capsys):
    path, weights = pretrained
    runner, log = start(
        recipe, {way: str(path), "model.backbone.img_size": side}, tmp_path / f"{recipe.stem}-{way}"
    )
    backbone = runner.model.backbone.state_dict()
    taken = [name for name in backbone if name.startswith(("layers.", "patch_embed.", "cls_token"))]
    assert len(taken) == 4 * 14 + 3
    for name in taken:
        assert torch.equal(backbone[name], weights[f"backbone.{name}"]), name
    assert backbone["pos_embed"].shape == (1, (side // 4) ** 2 + 1, 96)
    report = log + capsys.readouterr().out
    assert "mask_token" in report
    assert "source state_dict: ln" not in report, "MMEngine reports norms of another task as errors"
    assert "source state_dict: backbone.ln" not in report
    if way == "load_from":
        assert "unexpected key in source state_dict" in report


def test_weights_whose_names_fit_no_layer_are_refused(tmp_path):
    """As `init_cfg` does; MMEngine would train from random weights with a warning."""
    path = tmp_path / "timm.pth"
    torch.save({"state_dict": {"blocks.0.norm1.weight": torch.ones(3)}}, path)
    with pytest.raises(UserError, match=r"blocks\.0\.norm1\.weight.*backbone\."):
        start(FINE_TUNING, dict(load_from=str(path)), tmp_path / "work")
