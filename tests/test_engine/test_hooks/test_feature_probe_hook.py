"""FeatureProbeHook: the same figures in any number of processes, and a training undisturbed."""

import json

import pytest
import torch
from probed_training import PROBE, in_processes, loader, train

from mapet_mm.engine.hooks.feature_probe_hook import FeatureProbeHook
from mapet_mm.engine.hooks.knn_probe_hook import take_in_memory, undisturbed
from mapet_mm.evaluation.adapters import TokenBackbone
from mapet_mm.evaluation.protocols.knn import knn_votes
from mapet_mm.utils.errors import UserError

HOOK = dict(PROBE, type="mapet_mm.FeatureProbeHook")
LOW_SHOT = [dict(type="LowShot", shots=[2], draws=3)]


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    """A training without a hook."""
    return train(tmp_path_factory.mktemp("run"), [])


def test_training_goes_on_as_if_there_were_no_hook(runner, tmp_path):
    probed = train(tmp_path, [dict(HOOK, protocols=LOW_SHOT)])
    for one, two in zip(runner.model.parameters(), probed.model.parameters(), strict=True):
        assert torch.equal(one, two)
    assert probed.model.backbone.training
    (file,) = tmp_path.glob("*/vis_data/scalars.json")
    logged = [json.loads(line) for line in file.read_text().splitlines()]
    figures = [record for record in logged if "features/k-NN, both" in record]
    assert [record["step"] for record in figures] == [2, 3]
    # Dark and bright images are told apart by any features.
    assert {record["features/logistic regression, both, 2 a class"] for record in figures} == {100.0}
    assert {record["features/k-NN, mean"] for record in figures} == {100.0}


def test_figures_in_several_processes_are_those_of_one(runner, tmp_path):
    loaders = [loader(2, number=number, contrast=2) for number in (23, 11)]
    hook = FeatureProbeHook(*loaders, k=3, protocols=[dict(LOW_SHOT[0], shots=[1])])

    def probe() -> dict[str, float]:
        with undisturbed(runner.model):
            return hook.figures(TokenBackbone(runner.model), hook.build_loaders(runner))

    with undisturbed(runner.model):
        built = hook.build_loaders(runner)
        train_bank, val = (take_in_memory(TokenBackbone(runner.model), one, True) for one in built)
    known = [(train_bank.pooled("class token"), train_bank.labels)]
    right = knn_votes(val.pooled("class token"), known, 2, k=3).argmax(1) == val.labels
    found = [in_processes(number, probe, tmp_path) for number in (1, 2, 3)]
    expected = pytest.approx(100 * right.float().mean().item())
    assert found[0][0]["features/k-NN, class token"] == expected
    assert len(found[0][0]) == 4
    for several in found:
        assert several[0] == pytest.approx(found[0][0])  # the first process has them all
        assert all(one.items() <= several[0].items() for one in several)


@pytest.mark.parametrize("protocol", ["Lowshot", "AttentiveProbe", "LabelFree", "NearestNeighbours"])
def test_protocols_that_a_training_cannot_run_are_refused_before_it_starts(protocol):
    with pytest.raises(UserError, match=protocol):
        FeatureProbeHook(loader(), loader(), protocols=[dict(type=protocol)])
