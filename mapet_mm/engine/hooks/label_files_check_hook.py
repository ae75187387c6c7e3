"""Check the label files of a segmentation before they are trained on or tested with."""

from __future__ import annotations

from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import Dataset

from mapet_mm.datasets.label_files import IGNORED, Classes, OneClassError, check_label_files
from mapet_mm.engine.hooks.class_names_check_hook import class_names, classifying_modules
from mapet_mm.registry import HOOKS
from mapet_mm.utils.dist import unwrapped


@HOOKS.register_module()
class LabelFilesCheckHook(Hook):
    """Stop before training, or before a test, if label files are not the class indices that the model learns.

    Some files of each set are looked at, see `mapet_mm.datasets.label_files.check_label_files`. Sets of
    images without label files are left alone.

    Raises:
        LabelFileError: what is wrong with which file.
    """

    def before_train(self, runner: Runner) -> None:
        """Look at the training set and at the validation set."""
        self.check(runner, runner.train_dataloader.dataset)
        if runner.val_loop is not None:
            self.check(runner, runner.val_dataloader.dataset)

    def before_test(self, runner: Runner) -> None:
        """Look at the test set."""
        self.check(runner, runner.test_dataloader.dataset)

    def check(self, runner: Runner, dataset: Dataset) -> None:
        """Look at one set."""
        try:
            check_label_files(dataset, classes_of(unwrapped(runner.model), dataset))
        except OneClassError as error:
            remedy = "if that is meant, --cfg-options default_hooks.label_files_check=None"
            raise OneClassError(f"{error} ({remedy})") from None


def classes_of(model: nn.Module, dataset: Dataset) -> Classes:
    """The labels that both a model's heads and the names of a dataset's classes have a place for."""
    counts = []
    ignored = []
    for head in classifying_modules(model):
        if isinstance(head.num_classes, int):
            counts.append(head.num_classes)
        if getattr(head, "ignore_index", None) is not None:
            ignored.append(head.ignore_index)
    if class_names(dataset):
        counts.append(len(class_names(dataset)))
    # One class is a foreground, 1, beside a background.
    count = max(2, min(counts, default=IGNORED))
    ignored.append(getattr(dataset, "ignore_index", IGNORED))  # where no head says
    ignored_index = ignored[0]
    return Classes(count, ignored_index, getattr(dataset, "reduce_zero_label", False))
