"""A result's identity is what decides it: each decisive entry changes it, and nothing else does."""

import copy

import pytest
from lab import identity
from lab.identity import identity_of
from lab.plan import changed_config, current_identity, plan_table
from lab.tables import load_table

import mapet_mm

CONFIG = {
    "model": {"type": "mapet_mm.MaPeT", "backbone": {"cutting_point": 11}, "drop_path_rate": 0.1},
    "data_preprocessor": {"mean": [127.5]},
    "train_dataloader": {"batch_size": 32, "num_workers": 0, "dataset": {"ann_file": "meta/train.txt"}},
    "val_dataloader": {"dataset": {"ann_file": "meta/val.txt"}, "num_workers": 0},
    "val_evaluator": {"type": "Accuracy"},
    "optim_wrapper": {"optimizer": {"lr": 3e-3}},
    "param_scheduler": [{"end": 16}],
    "train_cfg": {"max_epochs": 16, "val_interval": 2},
    "auto_scale_lr": {"base_batch_size": 32},
    "tokenizer": {"codebook": "a.safetensors"},
    "codebook": {"k": 128, "seed": 0},
    "default_hooks": {"logger": {"interval": 10}},
    "log_level": "INFO",
}


def changed(key: str, value: object) -> dict:
    """The config with one entry changed, by its dotted key."""
    config = copy.deepcopy(CONFIG)
    *parents, last = key.split(".")
    node = config
    for name in parents:
        node = node[int(name)] if isinstance(node, list) else node.setdefault(name, {})
    node[last] = value
    return config


DECISIVE = {
    "model.backbone.cutting_point": 12,
    "data_preprocessor.mean": [0.0],
    "train_dataloader.dataset.ann_file": "meta/train_100.txt",
    "train_dataloader.batch_size": 64,
    "optim_wrapper.optimizer.lr": 6e-3,
    "param_scheduler.0.end": 8,
    "train_cfg.max_epochs": 8,
    "auto_scale_lr.base_batch_size": 64,
    "tokenizer.codebook": "b.safetensors",
    "codebook.k": 256,
}
INDIFFERENT = {
    "default_hooks.logger.interval": 50,
    "log_level": "WARNING",
    "train_dataloader.num_workers": 8,
    "train_cfg.val_interval": 1,
    "work_dir": "elsewhere",
    "model.type": "MaPeT",  # the same class by another spelling
}


@pytest.mark.parametrize("key", DECISIVE)
def test_what_decides_a_result_is_in_its_identity(key):
    assert identity_of("pre-training", changed(key, DECISIVE[key])) != identity_of("pre-training", CONFIG)


@pytest.mark.parametrize("key", INDIFFERENT)
def test_what_does_not_is_not(key):
    config = changed(key, INDIFFERENT[key])
    for kind in ("pre-training", "evaluation"):
        assert identity_of(kind, config) == identity_of(kind, CONFIG)


def test_validation_decides_an_evaluation_and_no_pretraining():
    config = changed("val_dataloader.dataset.ann_file", "meta/other.txt")
    assert identity_of("pre-training", config) == identity_of("pre-training", CONFIG)
    assert identity_of("evaluation", config) != identity_of("evaluation", CONFIG)


def test_seed_needs_version_of_the_protocols_and_of_the_recipes_decide(monkeypatch):
    plain = identity_of("evaluation", CONFIG, ["a", "b"], 0, 2)
    assert identity_of("evaluation", CONFIG, ["b", "a"], 0, 2) == plain
    others = [(["a", "c"], 0, 2), (["a", "b"], 1, 2), (["a", "b"], 0, 3)]
    found = {identity_of("evaluation", CONFIG, *other) for other in others}
    monkeypatch.setattr(identity, "RECIPES_VERSION", 99)
    assert len(found | {plain, identity_of("evaluation", CONFIG, ["a", "b"], 0, 2)}) == 5


def test_another_version_of_the_package_finds_every_record_again(monkeypatch):
    table = load_table("digits/objectives")
    before = plan_table(table, [0]).runs.keys()
    monkeypatch.setattr(mapet_mm, "__version__", "9.9.9")
    assert plan_table(table, [0]).runs.keys() == before


def test_a_run_has_the_identity_that_was_planned_until_its_config_changes(monkeypatch):
    for run in plan_table(load_table("digits/objectives"), [0]).runs.values():
        assert current_identity(run) == run.id

    def with_another_rate(*arguments):
        cfg = changed_config(*arguments)
        cfg.merge_from_dict({"optim_wrapper.optimizer.lr": 1.0})
        return cfg

    monkeypatch.setattr("lab.plan.changed_config", with_another_rate)
    assert current_identity(run) != run.id
