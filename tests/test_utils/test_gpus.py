"""A GPU that PyTorch cannot use stops a run that would go on, on the CPU."""

import os

import pytest
import torch
from gpu_runs import is_gpu_run
from mmengine.config import Config
from torch.torch_version import TorchVersion

from mapet_mm.engine.runners.launch import configure_test, configure_training
from mapet_mm.utils import gpus
from mapet_mm.utils.dist import choose_device
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.gpus import allow_deterministic_products, require_usable_gpu, runs_on

TOO_OLD = "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver."
LOCKED = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.fixture
def old_driver(monkeypatch, tmp_path):
    """A GPU whose driver is older than PyTorch's CUDA."""

    def init():
        raise RuntimeError(TOO_OLD)

    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(gpus, "DEVICE_FILES", str(tmp_path / "nvidia[0-9]*"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


STARTS = [
    require_usable_gpu,
    choose_device,
    lambda: configure_training(Config()),
    lambda: configure_test(Config(), "checkpoint.pth"),
]


@pytest.mark.parametrize("start", STARTS)
def test_a_driver_too_old_for_cuda_stops_every_start(old_driver, start):
    with pytest.raises(UserError, match=r"is too old \(found version 12020\).*580.*CUDA_VISIBLE_DEVICES"):
        start()


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_run_on_the_cpu_on_purpose_starts(old_driver, monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    choose_device()


def test_a_machine_without_gpu_and_a_build_without_cuda_start(old_driver, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "cuda", None)
        choose_device()
    (tmp_path / "nvidia0").unlink()
    (tmp_path / "nvidiactl").touch()
    choose_device()


@pytest.fixture
def two_gpus(monkeypatch):
    """An A100 and a V100, for PyTorch's build of CUDA 13."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: [(8, 0), (7, 0)][device])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: ["A100", "V100"][device])
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: LOCKED)


def test_a_gpu_that_the_build_has_no_code_for_stops_the_processes_that_would_use_it(two_gpus, monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("LOCAL_RANK", "2")
    choose_device()
    assert taken == [0]
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UserError, match=r"V100 is an sm_70.*cu126"):
        choose_device()


@pytest.mark.parametrize(
    ("capability", "built_for", "runs"),
    [
        ((7, 0), LOCKED, False),
        ((7, 0), ["sm_50", "sm_60", "sm_70", "sm_90"], True),
        ((8, 9), LOCKED, True),  # 8.6's code
        ((8, 0), ["sm_86"], False),
        ((12, 1), LOCKED, True),
        ((11, 0), LOCKED, False),
        ((13, 0), [*LOCKED, "compute_120"], True),
        ((9, 0), ["sm_90a"], True),
    ],
)
def test_code_runs_on_its_generation_and_portable_code_on_later_ones(capability, built_for, runs):
    assert runs_on(capability, built_for) == runs


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["pytest"], False),
        (["pytest", "-m", "not slow and not gpu"], False),
        (["pytest", "-m", "slow"], False),
        (["pytest", "-m", "gpu"], True),
        (["pytest", "-q", "-m", "gpu and not slow", "tests"], True),
    ],
)
def test_only_the_run_of_the_tests_for_a_gpu_sees_it(words, expected):
    assert is_gpu_run(words) is expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is the run for a GPU")
def test_the_other_tests_see_none():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("version", "own", "expected"),
    [("2.10.1", None, ":4096:8"), ("2.10.1", ":16:8", ":16:8"), ("2.11.0", None, None)],
)
def test_deterministic_products_before_torch_2_11_get_their_workspace(monkeypatch, version, own, expected):
    """PyTorch refuses them without; from 2.11 on it does not ask, and nothing changes."""
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", own or "")  # restored afterwards
    if own is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    allow_deterministic_products(dict(deterministic=False))
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == own
    allow_deterministic_products(dict(seed=0, deterministic=True))
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == expected
