"""TokenAccuracy averages what the model reports for each image."""

import pytest
from mmengine.evaluator import Evaluator
from mmengine.structures import BaseDataElement

import mapet_mm.registry  # noqa: F401


def sample(accuracy: float, loss: float) -> BaseDataElement:
    return BaseDataElement(token_accuracy=accuracy, token_loss=loss)


def test_averages_over_images_of_batches_of_different_size():
    evaluator = Evaluator(dict(type="mapet_mm.TokenAccuracy"))
    evaluator.process([sample(10.0, 3.0), sample(20.0, 2.0)])
    evaluator.process([sample(60.0, 1.0)])
    assert evaluator.evaluate(size=3) == {"token/accuracy": 30.0, "token/loss": 2.0}


def test_repeated_images_of_a_padded_last_batch_are_cut_off():
    evaluator = Evaluator(dict(type="mapet_mm.TokenAccuracy"))
    evaluator.process([sample(10.0, 3.0), sample(20.0, 1.0), sample(10.0, 3.0)])
    assert evaluator.evaluate(size=2) == {"token/accuracy": 15.0, "token/loss": 2.0}


def test_samples_of_another_model_are_refused():
    evaluator = Evaluator(dict(type="mapet_mm.TokenAccuracy"))
    with pytest.raises(ValueError, match="without `token_accuracy` and `token_loss`"):
        evaluator.process([BaseDataElement(pred_score=1)])
