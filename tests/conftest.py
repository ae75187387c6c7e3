"""Shared fixtures, and shapes checked: jaxtyping's annotations of the models are enforced by beartype."""

import gc
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

from gpu_runs import is_gpu_run

# One thread a process, here and in those that tests start: what is computed is small, and test processes run
# side by side. A forked one would wait for ever for threads that its parent had. PyTorch reads it when it is
# imported.
os.environ["OMP_NUM_THREADS"] = "1"
# A GPU is for `pytest -m gpu`: tests of equal bits, and what they start, compute on the CPU. MMEngine looks
# for a GPU when it is imported. (xdist's processes inherit it.)
if not is_gpu_run(sys.argv) and "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import jaxtyping
import pytest
import torch
from hypothesis import settings
from jaxtyping import install_import_hook
from mmengine.logging import MMLogger
from mmengine.registry import DefaultScope
from private_attributes import TEST_MODULES

from mapet_mm.utils.signals import SIGNALS

MODELS = Path(__file__).parents[1] / "mapet_mm/models"
CHECKED = [path for path in MODELS.rglob("*.py") if path.stem != "__init__"]
CHECKED = [".".join(path.relative_to(MODELS.parents[1]).with_suffix("").parts) for path in CHECKED]
install_import_hook(CHECKED, "beartype.beartype")

# The same few examples in every run; HYPOTHESIS_PROFILE=thorough draws many new ones.
settings.register_profile("quick", max_examples=8, derandomize=True, deadline=None, database=None)
settings.register_profile("thorough", max_examples=100, deadline=None, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_collection_finish() -> None:
    """Leave what the imports made out of garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in TEST_MODULES:
            item.add_marker("private")


FAKE_GPU = re.compile("on_a_gpu_only|copied_from_a_gpu|waits_for_no_gpu|wait_for_no_value")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of a GPU where there is none."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if FAKE_GPU.search(item.name) and torch.__version__ < "2.7" and not torch.cuda.is_available():
        pytest.skip("PyTorch 2.6 makes tensors without values on a GPU only where there is one")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    return Path(__file__).parent / "data"


@pytest.fixture(autouse=True, scope="session")
def _plain_configs():
    """Spare MMEngine the layout, not the text, of the configs that it logs and saves: 2 s a runner."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("yapf.yapflib.yapf_api.FormatCode", lambda text, **_: (text, True))
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_collection_by_datasets():
    """Spare MMEngine's datasets a garbage collection each: 0.3 s after all these imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmengine.dataset.base_dataset.gc", SimpleNamespace(collect=lambda: 0))
        yield


@pytest.fixture(autouse=True, scope="session")
def _workers_end_at_once():
    """A loader's worker looks only every 5 s whether its loader is still there, and Python waits for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL", 0.1)
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _default_scope():
    """MMPretrain's types are found without a prefix, whatever runner an earlier test has built."""
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        yield


@pytest.fixture
def capture_log(tmp_path):
    """Run with an MMEngine logger of the test's own; calling the fixture returns what was logged so far."""
    log_file = tmp_path / "log.txt"
    MMLogger.get_instance(f"test-{tmp_path.name}", log_file=str(log_file))
    return log_file.read_text


@pytest.fixture
def signals_given_back():
    """Signals end a process, also in the background or under nohup; afterwards they do as before."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def unchecked_types():
    """As outside the tests, where annotations are not enforced: a compiler would trace the checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
