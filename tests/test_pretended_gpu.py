"""The pretended GPU computes what the host computes, and refuses what CUDA refuses."""

import io

import pytest
import torch
from pretended_gpu import OnGPU, pretended_gpu, recorded_waits
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _gpu():
    with pretended_gpu():
        yield


@pytest.mark.parametrize(
    "operation",
    [
        lambda gpu, host: gpu + host,
        lambda gpu, host: host @ gpu,
        lambda gpu, host: torch.cat([gpu, host]),
        lambda gpu, host: gpu.add_(host),
        lambda gpu, host: host[gpu.argsort()],
        lambda gpu, host: host[0, 0].add_(gpu[0, 0]),
        lambda gpu, host: gpu.index_copy(0, torch.tensor([0]), gpu[:1]),
        lambda gpu, host: nn.Linear(3, 2).to("cuda")(host),
        lambda gpu, host: (gpu * host.requires_grad_()).sum().backward(),
    ],
)
def test_tensors_of_two_devices_are_refused(operation):
    with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
        operation(torch.eye(3, device="cuda"), torch.eye(3))


def test_what_cuda_takes_from_the_host_is_taken():
    """Single numbers, indices, and whole copies."""
    square = torch.arange(9.0).view(3, 3).cuda()
    assert (torch.tensor(2.0) * square).tolist()[2] == [12, 14, 16]
    assert square[torch.tensor([2, 0])].tolist() == [[6, 7, 8], [0, 1, 2]]
    square[0] = torch.tensor([5.0, 5.0, 5.0])
    assert square.cpu()[0].tolist() == [5, 5, 5]


def test_an_array_is_of_the_host_only():
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        torch.ones(2, device="cuda").numpy()
    assert torch.ones(2, device="cuda").cpu().numpy().sum() == 2


def test_what_the_host_waits_for_is_recorded():
    """A value, a copy to the host, and a mask as index; not indices, nor copies to the GPU."""
    square = torch.arange(9.0).view(3, 3).cuda()
    with recorded_waits() as waits:
        square = (
            square[torch.tensor([2, 0, 1], device="cuda")].copy_(torch.ones(3, 3)).to("cuda", torch.float64)
        )
        mask = square > 0
    assert waits == []
    for wait in (
        square.cpu,
        square.sum().item,
        mask.nonzero,
        lambda: square[mask],
        lambda: torch.ones(3, 3).copy_(square),
    ):
        with recorded_waits() as waits:
            wait()
        assert len(waits) == 1


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda")])
def test_tensors_are_made_and_moved_where_asked(device):
    for tensor in (
        torch.zeros(2, device=device),
        torch.tensor([1, 2], device=device),
        torch.ones(2).to(device, torch.int64, non_blocking=True),
        torch.ones(2, device=device).new_tensor([3.0]),
        torch.ones(2, device=device).view(2, 1)[0],
        nn.Linear(2, 2).to(device).weight,
    ):
        assert isinstance(tensor, OnGPU)
        assert (str(tensor.device), tensor.is_cuda, tensor.get_device()) == ("cuda:0", True, 0)
        assert str(tensor.cpu().device) == "cpu"
        assert not isinstance(torch.zeros_like(tensor, device="cpu"), OnGPU)


def test_a_network_learns_what_it_learns_on_the_host():
    """Attention, dropout's random numbers, one-hot targets, gradients of indexed rows, a fused optimizer."""

    def learn(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.LayerNorm(8)).to(device)
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.1, fused=True)
        rows = torch.randn(6, 4).to(device)
        for _ in range(3):
            tokens = network(rows)[None, None]
            tokens = scaled_dot_product_attention(tokens, tokens, tokens)[0, 0]
            targets = nn.functional.one_hot(torch.arange(3, device=device), 8)
            (tokens[torch.tensor([0, 2, 2])] - targets).square().mean().backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return [value.cpu() for value in network.state_dict().values()]

    torch.testing.assert_close(learn("cuda"), learn("cpu"), rtol=0, atol=0)


def test_autocast_computes_in_the_precision_that_cuda_chooses():
    """Products in bfloat16, sums over many terms in float32; not on the host's tensors."""
    rows = torch.ones(2, 2, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        found = nn.Linear(2, 2).cuda()(rows)
        assert (found.dtype, (rows @ found).dtype) == (torch.bfloat16, torch.bfloat16)
        assert nn.functional.layer_norm(found, (2,)).dtype == found.softmax(1).dtype == torch.float32
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float32
        with torch.autocast("cuda", enabled=False):
            assert (rows @ rows).dtype == torch.float32
            with pytest.raises(RuntimeError, match="dtype"):
                rows @ found


def test_saved_tensors_come_back_to_the_device_that_is_asked_for():
    file = io.BytesIO()
    torch.save({"weight": torch.ones(2, device="cuda").cpu()}, file)
    for device in ("cuda", "cpu"):
        file.seek(0)
        assert torch.load(file, map_location=device)["weight"].device.type == device


def test_afterwards_there_is_no_gpu_as_before():
    with pretended_gpu():
        pass
    assert torch.cuda.is_available()  # of the fixture
