"""FeatureProbeHook: the same figures in any number of processes, and a training undisturbed."""

import json

import pytest
import torch
from mapet_mm.evaluation.image_features import build_loader, image_features, undisturbed

from mapet_mm.engine.hooks.feature_probe_hook import FeatureProbeHook
from mapet_mm.engine.hooks.knn_probe_hook import knn_predict
from mapet_mm.registry import HOOKS
from mapet_mm.utils.errors import UserError
from tests.test_engine.test_knn import PROBE, in_processes, train

HOOK = dict(PROBE, type="mapet_mm.FeatureProbeHook")
LOW_SHOT = [dict(type="LowShot", shots=[2], draws=3, pooling="mean")]


def test_training_goes_on_as_if_there_were_no_hook(tmp_path):
    without = train(tmp_path / "without", [])
    probed = train(tmp_path / "with", [dict(HOOK, protocols=LOW_SHOT)])
    for one, two in zip(without.model.parameters(), probed.model.parameters(), strict=True):
        assert torch.equal(one, two)
    assert probed.model.backbone.training
    assert not any(module._forward_hooks for module in probed.model.backbone.modules())
    (file,) = (tmp_path / "with").glob("*/vis_data/scalars.json")
    logged = [json.loads(line) for line in file.read_text().splitlines()]
    figures = [record for record in logged if "features/k-NN, both" in record]
    assert [record["step"] for record in figures] == [2, 3]
    # Dark and bright images are told apart by any features.
    assert {record["features/logistic regression, mean, 2 a class"] for record in figures} == {100.0}
    assert {record["features/k-NN, mean"] for record in figures} == {100.0}


def test_figures_in_several_processes_are_those_of_one(tmp_path):
    images, queries = 23, 11
    runner = train(tmp_path / "run", [])
    sets = [dict(type="mapet_mm.TwoColours", number=number, contrast=2) for number in (images, queries)]
    loaders = [dict(batch_size=2, num_workers=0, dataset=dataset) for dataset in sets]
    protocols = [dict(LOW_SHOT[0], shots=[1])]
    with undisturbed(runner.model):
        (features, labels), (others, truth) = (
            image_features(runner.model, build_loader(loader), "class token") for loader in loaders
        )
    expected = 100 * (knn_predict(features, labels, others, 2, 3) == truth).float().mean().item()

    def probe() -> dict[str, float]:
        return FeatureProbeHook(*loaders, k=3, protocols=protocols).figures(runner)

    found = [in_processes(number, probe, tmp_path) for number in (1, 2, 3)]
    assert found[0][0]["features/k-NN, class token"] == pytest.approx(expected)
    assert len(found[0][0]) == 4
    for several in found:
        assert several[0] == pytest.approx(found[0][0])  # the first process has them all
        assert all(one.items() <= several[0].items() for one in several)


def test_of_averaged_weights_the_average_is_probed(tmp_path):
    runner = train(tmp_path / "run", [dict(type="EMAHook", momentum=0.1)])
    for parameter in runner.model.parameters():
        parameter.data.fill_(torch.nan)
    assert HOOKS.build(HOOK).figures(runner)["features/k-NN, mean"] == 100


@pytest.mark.parametrize(
    ("protocol", "message"),
    [
        ("Lowshot", "there is no protocol Lowshot: one of "),
        ("AttentiveProbe", "only; AttentiveProbe needs others: leave it to tools/evaluate_features.py"),
        ("LabelFree", "LabelFree needs others"),
        ("SegmentationByNeighbours", "SegmentationByNeighbours needs others"),
        ("TokenPredictions", "TokenPredictions needs others"),
        (
            "NearestNeighbours",
            "has k-NN itself: leave NearestNeighbours out of its `protocols`, and set the hook",
        ),
    ],
)
def test_protocols_that_a_training_cannot_run_are_refused_before_it_starts(protocol, message):
    loaders = HOOK["train_dataloader"], HOOK["val_dataloader"]
    with pytest.raises(UserError) as error:
        FeatureProbeHook(*loaders, protocols=[dict(type=protocol)])
    assert message in str(error.value)
