"""Check that training and evaluation sets number their classes alike."""

from __future__ import annotations

from collections.abc import Sequence

from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import Dataset

from mapet_mm.registry import HOOKS
from mapet_mm.utils.dist import unwrapped
from mapet_mm.utils.errors import UserError

# Parts of a model that predict no classes, although they may have `num_classes`.
NO_CLASSIFIERS = ("backbone", "data_preprocessor", "target_generator")


class ClassNamesError(UserError, ValueError):
    """Two sets of images number their classes in different orders."""


@HOOKS.register_module()
class ClassNamesCheckHook(Hook):
    """Stop before training, or before a test, if an index means another class there than in training.

    Datasets number class folders by their sorted names, so a folder that one set lacks shifts all after it,
    and accuracies are wrong. Only models that predict classes and datasets that name theirs are compared.

    Raises:
        ClassNamesError: a class of the evaluated images has another index in training.
    """

    def __init__(self) -> None:
        self.learnt: Sequence[str] = ()

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Remember the classes that the weights were trained on."""
        meta = (checkpoint.get("meta") or {}).get("dataset_meta") or {}
        self.learnt = meta.get("classes") or ()

    def before_train(self, runner: Runner) -> None:
        """Compare the validation set with the training set."""
        if runner.val_loop is not None and classifying_modules(unwrapped(runner.model)):
            learnt = class_names(runner.train_dataloader.dataset)
            check_class_order(learnt, class_names(runner.val_dataloader.dataset), "training", "validation")

    def before_test(self, runner: Runner) -> None:
        """Compare the test set with the training set that the checkpoint records."""
        if classifying_modules(unwrapped(runner.model)):
            check_class_order(
                self.learnt, class_names(runner.test_dataloader.dataset), "checkpoint's", "test"
            )


def classifying_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that have a number of classes, in a model's parts that predict classes."""
    found = []
    for name, part in model.named_children():
        if name not in NO_CLASSIFIERS:
            found += [module for module in part.modules() if getattr(module, "num_classes", None)]
    return found


def class_names(dataset: Dataset) -> Sequence[str]:
    """The classes in the order of their indices; empty if the dataset does not name them."""
    return getattr(dataset, "metainfo", {}).get("classes") or ()


def check_class_order(learnt: Sequence[str], measured: Sequence[str], learning: str, measuring: str) -> None:
    """Raise ClassNamesError if a class that both sets name has one index here and another there."""
    index_in_training = {name: index for index, name in enumerate(learnt)}
    for index, name in enumerate(measured):
        is_same = name in learnt[index : index + 1]  # a name may be two classes' ("crane")
        if name in index_in_training and not is_same:
            other = index_in_training[name]
            raise ClassNamesError(
                f"class `{name}` is number {index} in the {measuring} images and number {other} in "
                f"the {learning} images: add the class folder that is missing"
            )
