"""Metrics average what the model reports for each image."""

import torch
from mmengine.evaluator import Evaluator
from mmengine.runner import LogProcessor
from mmengine.structures import BaseDataElement

import mapet_mm.registry  # noqa: F401


def sample(accuracy: float, loss: float) -> BaseDataElement:
    return BaseDataElement(token_accuracy=accuracy, token_loss=loss)


def test_averages_over_images_of_batches_of_different_size():
    evaluator = Evaluator(dict(type="mapet_mm.TokenAccuracy"))
    evaluator.process([sample(10.0, 3.0), sample(20.0, 2.0)])
    evaluator.process([sample(60.0, 1.0)])
    assert evaluator.evaluate(size=3) == {"token/accuracy": 30.0, "token/cross_entropy": 2.0}


def test_each_validation_is_logged_by_itself():
    """MMEngine logs the mean of the last ten validations of names that match this pattern."""
    evaluator = Evaluator(dict(type="mapet_mm.TokenAccuracy"))
    evaluator.process([sample(10.0, 3.0)])
    averaged = LogProcessor().mean_pattern
    assert averaged.match("token/loss")
    assert not [name for name in evaluator.evaluate(size=1) if averaged.match(name)]


def labels(truth: int, **layers: int) -> BaseDataElement:
    layers = {int(name[1:]): label for name, label in layers.items()}
    return BaseDataElement(gt_label=torch.tensor([truth]), layer_labels=layers)


def test_every_layers_accuracy_and_the_best_of_them():
    """Layer 9 is right 3 of 4 times; a tie goes to the first."""
    evaluator = Evaluator(dict(type="mapet_mm.LayerwiseAccuracy"))
    evaluator.process([labels(1, l3=1, l9=1, l12=0), labels(0, l3=2, l9=0, l12=0)])
    evaluator.process([labels(4, l3=4, l9=2, l12=4), labels(2, l3=0, l9=2, l12=2)])
    layers = {"accuracy/layer-3": 50.0, "accuracy/layer-9": 75.0, "accuracy/layer-12": 75.0}
    best = {"accuracy/best": 75.0, "accuracy/best_layer": 9, "accuracy/top1": 75.0}
    assert evaluator.evaluate(size=4) == layers | best
    evaluator.process(
        [labels(1, l3=1, l9=1, l12=0), labels(0, l3=2, l9=0, l12=0), labels(4, l3=4, l9=4, l12=4)]
    )
    assert evaluator.evaluate(size=2)["accuracy/layer-3"] == 50.0  # the third filled the last batch up
