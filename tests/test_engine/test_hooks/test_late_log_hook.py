"""What is logged late is what MMEngine logs, and one look reads all of it."""

import copy

import pytest
import torch
from mmengine.logging import HistoryBuffer, MessageHub
from step_counts import StepCounts

from mapet_mm.engine.hooks import late_log_hook
from mapet_mm.engine.hooks.late_log_hook import log_late

VALUES = [0.1, 2.5, -3.0, 7.25]


@pytest.fixture
def hubs(tmp_path) -> tuple[MessageHub, MessageHub]:
    """One with MMEngine's history of the values, and one that noted them late."""
    eager, late = MessageHub(f"eager {tmp_path}"), MessageHub(f"late {tmp_path}")
    for value in map(torch.tensor, VALUES):
        eager.update_scalar("train/loss", value)
        log_late(late, "train/loss", value.requires_grad_())
    return eager, late


@pytest.mark.parametrize(
    "look",
    [
        lambda history: history.mean(2),
        lambda history: history.max(3),
        lambda history: history.min(),
        lambda history: history.current(),
        lambda history: history.statistics("mean", window_size=3),
        lambda history: [values.tolist() for values in history.data],
        lambda history: [values.tolist() for values in copy.deepcopy(history).data],
    ],
)
def test_each_look_gives_what_mmengines_history_gives_with_one_wait(hubs, look):
    eager, late = (hub.get_scalar("train/loss") for hub in hubs)
    with StepCounts() as counts:
        found = look(late)
    assert found == look(eager)
    assert counts.waits.total() == 1
    with StepCounts() as counts:
        assert look(late) == found
    assert not counts.waits


def test_noting_waits_for_nothing_and_follows_earlier_numbers(tmp_path):
    hub = MessageHub(str(tmp_path))
    hub.log_scalars["train/loss"] = HistoryBuffer([5.0], [1])
    with StepCounts() as counts:
        log_late(hub, "train/loss", torch.tensor([6.0]))
        log_late(hub, "train/loss", torch.tensor(7.0))
    assert not counts.waits
    log_late(hub, "train/loss", 8.0)
    assert hub.get_scalar("train/loss").data[0].tolist() == [5.0, 6.0, 7.0, 8.0]


def test_a_log_that_nobody_reads_does_not_grow_on_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr(late_log_hook, "MOST_WAITING", 3)
    hub = MessageHub(str(tmp_path))
    for value in range(8):
        log_late(hub, "train/loss", torch.tensor(value))
        assert len(hub.get_scalar("train/loss").waiting) < 3
    assert hub.get_scalar("train/loss").data[0].tolist() == list(range(8))
