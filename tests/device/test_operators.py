"""Operators on the simulated device: the host's bits, CUDA's autocast, random numbers that no schedule changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from device import sim
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = pytest.mark.simulated


class Network(nn.Module):
    """One of each kind: convolution, normalizations, attention, embedding, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 16)
        self.mix = nn.Conv1d(16, 16, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm1d(16), nn.LayerNorm(16), nn.RMSNorm(16)])
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.mix(self.tokens(tokens).transpose(1, 2)).transpose(1, 2)
        x = self.norms[0](x.flatten(0, 1)).view_as(x)
        y = self.norms[1](x)
        x = self.norms[2](x + self.attention(y, y, y, need_weights=False)[0])
        x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def train(device: torch.device | str, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(1)
    network = Network().to(dtype).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2, foreach=True)  # the device's default
    tokens = torch.arange(24).reshape(3, 8).remainder(11).to(device)
    for _ in range(3):
        optimizer.zero_grad()
        network(tokens).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 0.1, foreach=True)
        optimizer.step()
    return [value.cpu() for value in network.state_dict().values()]


@pytest.mark.device("eager", "lazy", "random1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_training_gives_the_hosts_bits(device: torch.device, dtype: torch.dtype) -> None:
    for ours, hosts in zip(train(device, dtype), train("cpu", dtype), strict=True):
        torch.testing.assert_close(ours, hosts, rtol=0, atol=0)


class Recurrent(nn.Module):
    """What torch computes otherwise on a device, or in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(11, 16)
        self.layers = nn.ModuleList([nn.LSTM(16, 16, batch_first=True), nn.GRU(16, 16, bias=False, batch_first=True)])
        self.norm = nn.BatchNorm1d(16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
        self.norm.weight.requires_grad_(False)
        self.encoder.norm1.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bag(tokens)[None]
        for layer in self.layers:
            x = layer(x)[0]
        return self.encoder(self.norm(x[0])[None])


def results(device: torch.device | str) -> list[Tensor]:
    """Of training, of evaluation, and with frozen statistics; two parameters are frozen."""
    torch.manual_seed(1)
    network, found = Recurrent().to(device, torch.float64), []
    for training in (True, False):
        network.train(training)
        network.zero_grad()
        tokens = torch.arange(24).reshape(3, 8).remainder(11).to(device)
        with torch.no_grad():
            found.append(network(tokens))
        network(tokens).square().sum().backward()
        found += [parameter.grad for parameter in network.parameters() if parameter.requires_grad]
    return [value.cpu() for value in found]


@pytest.mark.device
def test_recurrent_networks_and_evaluation(device: torch.device) -> None:
    torch.testing.assert_close(results(device), results("cpu"), rtol=1e-9, atol=1e-12)


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_autocast_casts_as_on_cuda(device: torch.device, dtype: torch.dtype) -> None:
    low, x = torch.ones(4, 4, device=device, dtype=dtype), torch.ones(4, 4, device=device)
    cases: dict[Callable[[], Tensor], torch.dtype] = {
        lambda: x @ x: dtype,
        lambda: F.linear(x, x): dtype,
        lambda: F.conv1d(x[None], x[..., None]): dtype,
        lambda: F.scaled_dot_product_attention(x[None], x[None], x[None]): dtype,
        lambda: low.softmax(-1): torch.float32,
        lambda: F.cross_entropy(low, low.argmax(-1)): torch.float32,
        lambda: F.layer_norm(low, (4,)): torch.float32,
        low.sum: torch.float32,
        low.norm: torch.float32,
        low.exp: torch.float32,
        lambda: torch.addcmul(low, x, low): torch.float32,  # the widest
        lambda: low + low: dtype,
        lambda: F.gelu(low): dtype,
    }
    with torch.autocast(device.type, dtype):
        for number, (function, expected) in enumerate(cases.items()):
            assert function().dtype == expected, number
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(x, x)


@pytest.mark.device
def test_results_of_unlike_calls_are_not_mixed_up(device: torch.device) -> None:
    """What an operator returns is asked once for arguments that are alike."""
    x, index = torch.arange(12.0).reshape(3, 4), torch.tensor([0, 2, 1])
    cases: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda x, i: x[i],
        lambda x, i: x[:, i],
        lambda x, i: x.t()[i],
        lambda x, i: x.double()[i],
        lambda x, i: x.sum(0),
        lambda x, i: x.sum(1),
        lambda x, i: x.sum((0, 1), keepdim=True),
        lambda x, i: x.sum((0, 1)),
        lambda x, i: x.sum(0, dtype=torch.float64),
        lambda x, i: torch.full_like(x, 1),
        lambda x, i: torch.full_like(x, 1, dtype=torch.int64),
        lambda x, i: torch.arange(0, 3.5, device=x.device),
        lambda x, i: torch.arange(0, 1.5, device=x.device),
        lambda x, i: i / 2,
        lambda x, i: i * 2,
        lambda x, i: F.mse_loss(x, x + 2),
        lambda x, i: F.mse_loss(x, 2 * x, reduction="sum"),
        lambda x, i: F.mse_loss(x, 2 * x, reduction="none"),
        lambda x, i: x.histc(3),
        lambda x, i: i.double().histc(3, 0, 2).long() if i.is_cpu else i.histc(3, 0, 2),  # which the host has not
    ]
    for number, case in enumerate(cases):
        result, expected = case(x.to(device), index.to(device)), case(x, index)
        assert (result.dtype, result.stride()) == (expected.dtype, expected.stride()), number
        assert torch.equal(result.cpu(), expected), number


def draw(device: torch.device) -> list[Tensor]:
    torch.manual_seed(5)
    x = torch.ones(50, device=device)
    own = torch.Generator(device).manual_seed(7)
    drawn = torch.randn(50, device=device), F.dropout(x), torch.randperm(50, device=device, generator=own)
    return [tensor.cpu() for tensor in drawn]


@pytest.mark.device
def test_random_numbers_follow_the_calls_and_not_the_schedule(device: torch.device) -> None:
    expected = draw(device)
    assert expected[0].std() > 0.5
    assert sorted(expected[1].unique().tolist()) == [0.0, 2.0]
    assert sorted(expected[2].tolist()) == list(range(50))
    for schedule in ("eager", "random"):
        sim.install().schedule(schedule, 3)
        assert all(map(torch.equal, draw(device), expected))
    state = torch.sim.get_rng_state(device)
    once = torch.rand(3, device=device).cpu()
    torch.sim.set_rng_state(state, device)
    assert torch.equal(torch.rand(3, device=device).cpu(), once)
    assert not torch.equal(torch.rand(3, device=device).cpu(), once)


@pytest.mark.device
def test_a_number_of_python_takes_the_tensors_dtype(device: torch.device) -> None:
    """Without it, a norm and its factor are rounded otherwise than on the host, and on CUDA."""
    for scalar in torch.rand(50):
        there = scalar.to(device)
        for result, expected in ((0.3 / there, 0.3 / scalar), (there * 0.3, scalar * 0.3)):
            assert result.dtype == torch.float32
            assert torch.equal(result.cpu(), expected)
