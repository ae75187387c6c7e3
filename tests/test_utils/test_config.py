"""Configs whose numbers or entries cannot be are refused in one line that names the key."""

import re

import pytest
from mmengine.config import Config

from mapet_mm.utils.config import read_config, require_entries
from mapet_mm.utils.errors import LaunchError

RIGHT = dict(randomness=dict(seed=None), train_dataloader=dict(num_workers=0, batch_size=1))


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("randomness.seed", -1, "-1: give a whole number from 0 to 4294967295"),
        ("randomness.seed", 2**32, "4294967296: give a whole number from 0 to 4294967295"),
        ("randomness.seed", "abc", "'abc': give a whole number from 0 to"),
        ("codebook.seed", 1.5, "1.5: give a whole number from 0 to"),
        ("train_dataloader.num_workers", -1, "-1: give a whole number from 0 on"),
        ("evaluation.val.num_workers", "two", "'two': give a whole number from 0 on"),
        ("train_dataloader.batch_size", 0, "0: give a whole number from 1 on"),
    ],
)
def test_seeds_workers_and_batches_that_cannot_be_are_named(tmp_path, key, value, wanted):
    path = tmp_path / "config.py"
    Config(RIGHT).dump(path)
    assert read_config(path, options={"randomness.seed": 2**32 - 1}).randomness.seed == 2**32 - 1
    with pytest.raises(LaunchError, match=re.escape(f"{path}: `{key}` is {wanted}")):
        read_config(path, options={key: value})


def test_an_entry_that_a_command_needs_is_named_with_the_config_to_take(tmp_path):
    Config(RIGHT).dump(tmp_path / "my.py")
    cfg = read_config(tmp_path / "my.py")
    require_entries(cfg, "randomness", "train_dataloader")
    with pytest.raises(LaunchError, match=r"my.py has no `tokenizer`, which this needs: take another"):
        require_entries(cfg, "randomness", "tokenizer", remedy="take another")
