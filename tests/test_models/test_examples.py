"""The example in the docstring of each public class of `mapet_mm.models`, run as it stands there."""

import doctest
import inspect
import sys

import numpy as np
import pytest
import torch
from mmengine.logging import MMLogger
from mmpretrain.structures import DataSample

from mapet_mm import models
from mapet_mm.models.backbones.two_stream_vit import TwoStreamViT

CLASSES = [
    value
    for value in vars(models).values()
    if inspect.isclass(value) and value.__module__.startswith("mapet_mm.models.")
]
CLASSES.append(TwoStreamViT)  # which docs/api shows, too


@pytest.mark.parametrize("public", CLASSES, ids=lambda public: public.__name__)
def test_the_example_gives_what_it_says(public, unchecked_types):
    MMLogger.get_current_instance()  # made inside the example, it would write into its output
    names = dict(vars(sys.modules[public.__module__]), torch=torch, np=np, DataSample=DataSample)
    found = doctest.DocTestFinder(recurse=False).find(public, public.__name__, globs=names)
    examples = [example for test in found for example in test.examples]
    assert examples, f"the docstring of {public.__name__} has no example"
    result = doctest.DocTestRunner().run(found[0])
    assert result.failed == 0
