"""The table of FLOPs: height and width are not swapped."""

import pytest
import torch
from config_building import run_tool
from mmengine.config import Config
from torch import nn

from mapet_mm.registry import MODELS


@MODELS.register_module()
class RowsOnly(nn.Module):
    """A convolution whose windows do not overlap in one direction and do in the other."""

    img_size = (8, 8)

    def __init__(self, patch_size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 1, (patch_size, 1), stride=(patch_size, 1), bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.conv(images)


@MODELS.register_module()
class RowsOnlyModel(nn.Module):
    """As much of an algorithm as the tool uses."""

    def __init__(self, backbone: dict) -> None:
        super().__init__()
        self.backbone = MODELS.build(backbone)

    def extract_feat(self, images: torch.Tensor) -> torch.Tensor:
        assert images.shape[2:] == (96, 16), images.shape
        return self.backbone(images)


@pytest.fixture
def config(tmp_path):
    backbone = dict(type="mapet_mm.RowsOnly", patch_size=8)
    model = dict(type="mapet_mm.RowsOnlyModel", backbone=backbone)
    Config(dict(default_scope="mmpretrain", model=model)).dump(tmp_path / "config.py")
    return tmp_path / "config.py"


def test_height_comes_before_width(config, monkeypatch, capsys):
    """96 pixels high and 16 wide are 12 x 16 windows of 24 values."""
    run_tool(monkeypatch, "get_flops.py", config, "--shape", "96", "16")
    *_, row = capsys.readouterr().out.splitlines()
    assert row.split("|")[3].strip() == f"{12 * 16 * 24 / 1e9:.4g}"
