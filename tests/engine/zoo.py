"""Kinds of models that users bring, each small and named after what is special about it.

All take a batch of rows `[values (4), step, rank]`, so that a forward may depend on either, and return a tensor whose
mean square is the loss.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

WIDTH = 4
ROWS = 3
M = TypeVar("M", bound=type[nn.Module])


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        make: constructs it.
        units: its units, as the engine's option.
        exact: whether sharded training is equal to plain training bit by bit.
    """

    make: Callable[[], nn.Module]
    units: tuple[str, ...]
    exact: bool = True


KINDS: dict[str, Kind] = {}


def kind(*units: str, exact: bool = True, **options: Any) -> Callable[[M], M]:
    """Class decorator: add a class, constructed with `options`, to `KINDS`."""

    def add(cls: M) -> M:
        name = "_".join([cls.__name__, *(str(value) for value in options.values())])
        KINDS[name] = Kind(functools.partial(cls, **options), units, exact)
        return cls

    return add


def make(name: str, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return KINDS[name].make()


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def make_batches(steps: int, micro: int, world: int, dtype: torch.dtype = torch.float32) -> list[list[list[Tensor]]]:
    """Batches `[step][micro-batch][rank]`."""
    generator = torch.Generator().manual_seed(0)

    def batch(step: int, rank: int) -> Tensor:
        values = torch.randn(ROWS, WIDTH, generator=generator)
        return torch.cat([values, torch.tensor([[step, rank]]).expand(ROWS, 2)], dim=1).to(dtype)

    return [[[batch(step, rank) for rank in range(world)] for _ in range(micro)] for step in range(steps)]


class Rows(NamedTuple):
    """A batch, taken apart."""

    x: Tensor  # ROWS x WIDTH
    step: int
    rank: int


def rows(batch: Tensor) -> Rows:
    return Rows(batch[:, :WIDTH], int(batch[0, WIDTH]), int(batch[0, WIDTH + 1]))


class Block(nn.Module):
    """A residual block, the unit of most models here."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 7)
        self.down = nn.Linear(7, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Blocks between two layers of the root."""

    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Tensor) -> Tensor:
        x = self.first(rows(batch).x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


# ------------------------------------------------------------------------------------------- which parameters there are


class SquareBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.inner, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.inner(torch.tanh(self.up(x)))))


@kind("SquareBlock")
class Tied(Stack):
    """One weight in three units, one in two, one in a unit and the root, one twice in a unit."""

    def __init__(self) -> None:
        super().__init__(SquareBlock, depth=3)
        first, second, third = self.blocks
        second.up.weight = third.up.weight = first.up.weight
        third.down.bias = first.down.bias
        self.last.weight = second.down.weight
        third.down.weight = third.inner.weight


@kind("SquareBlock")
class TiedFrozen(Tied):
    """A tied weight is frozen, another is not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].up.weight.requires_grad_(False)


@kind("Block")
class OwnedByRoot(Stack):
    """Parameters of the root itself: whole, with fewer elements than ranks, 0-dim, empty."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Parameter(torch.ones(WIDTH))
        self.gain = Parameter(torch.tensor(1.5))
        self.one = Parameter(torch.ones(1))
        self.nothing = Parameter(torch.empty(0, 3))

    def forward(self, batch: Tensor) -> Tensor:
        return super().forward(batch) * self.scale * self.gain * self.one + self.nothing.sum()


class TinyBlock(nn.Module):
    """Fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = Parameter(torch.tensor(1.5))
        self.empty = Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.empty.sum()


@kind("TinyBlock")
class Tiny(Stack):
    def __init__(self) -> None:
        super().__init__(TinyBlock)


class EmptyBlock(nn.Module):
    """Its only parameter has no element."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = Parameter(torch.empty(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.empty])


@kind("EmptyBlock")
class Empty(Stack):
    def __init__(self) -> None:
        super().__init__(EmptyBlock)


class MixedBlock(nn.Module):
    """Four dtypes in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.bf16 = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.order = Parameter(torch.randperm(WIDTH), requires_grad=False)
        self.mask = Parameter(torch.rand(WIDTH) > 0.3, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.wide(self.narrow(x).double())).bfloat16()
        return self.bf16(x).float()[:, self.order] * self.mask


@kind("MixedBlock")
class Dtypes(Stack):
    def __init__(self) -> None:
        super().__init__(MixedBlock)


class StridedBlock(nn.Module):
    """A transposed and a permuted weight, an expanded one, and a slice of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = Parameter(torch.randn(7, WIDTH).t())
        self.permuted = Parameter(torch.randn(2, WIDTH, 7).permute(1, 2, 0))
        self.expanded = Parameter(torch.randn(WIDTH, 1).expand(WIDTH, 3), requires_grad=False)
        self.sliced = Parameter(torch.randn(WIDTH, 9)[:, ::3])

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.transposed @ self.permuted.sum(2).t()
        return torch.tanh(x @ self.expanded @ self.sliced.t())


@kind("StridedBlock")
class Strided(Stack):
    def __init__(self) -> None:
        super().__init__(StridedBlock)


class ConvBlock(nn.Module):
    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(x + self.norm2(self.conv2(y)))


@kind("ConvBlock")
class ResNet(nn.Module):
    """Residual convolutions with batch normalization, whose statistics each rank gathers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.Sequential(ConvBlock(), ConvBlock())
        self.head = nn.Linear(4, WIDTH)

    def forward(self, batch: Tensor) -> Tensor:
        x = rows(batch).x
        images = x[:, None, :, None] * x[:, None, None, :]
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


@kind("ConvBlock")
class ChannelsLast(ResNet):
    """Convolutions whose weights keep their channels innermost."""

    def __init__(self) -> None:
        super().__init__()
        self.to(memory_format=torch.channels_last)

    def forward(self, batch: Tensor) -> Tensor:
        assert all(
            m.weight.is_contiguous(memory_format=torch.channels_last)
            for m in self.modules()
            if isinstance(m, nn.Conv2d)
        )
        return super().forward(batch)


# ----------------------------------------------------------------------------------------------- which of them are used


@kind("Block")
class OtherOrder(Stack):
    """Units are entered in another order, and another number of times, in each step."""

    ORDERS: ClassVar = [(0, 1, 2), (2, 0, 1, 0), (1, 1, 1), (1, 2)]

    def __init__(self) -> None:
        super().__init__(depth=3)

    def forward(self, batch: Tensor) -> Tensor:
        x, step, _ = rows(batch)
        x = self.first(x)
        for index in self.ORDERS[step % 4]:
            x = self.blocks[index](x)
        return self.last(x)


class OptionalBlock(Block):
    """On some ranks, or on none or all, it hands on its input."""

    def forward(self, x: Tensor, used: bool = True) -> Tensor:
        return super().forward(x) if used else x


@kind("OptionalBlock")
class UnusedUnit(Stack):
    """Every rank enters the units, in which some or all then use nothing."""

    def __init__(self) -> None:
        super().__init__(OptionalBlock, depth=3)

    def forward(self, batch: Tensor) -> Tensor:
        x, step, rank = rows(batch)
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = block(x, bool((step + index + rank) % 3))
            x = x + block(x, (step + rank) % 2 == 0)
        return self.last(x)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 5)
        self.down = nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.up(x)))


class MoE(nn.Module):
    """Each row goes to one expert; some experts get none, others on one rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 5)
        self.experts = nn.ModuleList(Expert() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(1).max(1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = (chosen == index).nonzero()[:, 0]
            if len(mine):
                y = y.index_add(0, mine, expert(x[mine]) * weight[mine, None])
        return x + y


@kind("MoE")
class Experts(Stack):
    def __init__(self) -> None:
        super().__init__(MoE)


@kind("Block")
class Siamese(Stack):
    """One encoder for two inputs; and a third pass whose output nothing uses."""

    def forward(self, batch: Tensor) -> Tensor:
        encode = super().forward
        unused = encode(batch + 1.0)
        del unused
        return encode(batch) - encode(batch.flip(0)) * 0.5


@kind("Block")
class UNet(nn.Module):
    """Skip connections from early units to late ones."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Block() for _ in range(2))
        self.middle = Block()
        self.up = nn.ModuleList(Block(2 * WIDTH) for _ in range(2))
        self.merge = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))

    def forward(self, batch: Tensor) -> Tensor:
        x, skips = rows(batch).x, []
        for block in self.down:
            x = block(x)
            skips.append(x)
        x = self.middle(x)
        for block, merge in zip(self.up, self.merge, strict=True):
            x = merge(block(torch.cat([x, skips.pop()], dim=1)))
        return x


# ------------------------------------------------------------------------------------------------------ torch.nn layers


class OverSequence(nn.Module):
    """A batch as a sequence: ROWS steps of one sample."""

    def __init__(self, layer: nn.Module, out: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layer = layer
        self.last = nn.Linear(out, WIDTH)

    def forward(self, batch: Tensor) -> Tensor:
        return self.last(self.run(self.first(rows(batch).x)[None]))

    def run(self, x: Tensor) -> Tensor:
        y, _ = self.layer(x)
        return y


@kind("LSTM")
class Lstm(OverSequence):
    def __init__(self) -> None:
        lstm = nn.LSTM(WIDTH, 5, num_layers=2, bidirectional=True, proj_size=3, batch_first=True)
        super().__init__(lstm, 6)
        lstm.flatten_parameters()


@kind()
class LstmInRoot(Lstm):
    pass


@kind("GRU")
class Gru(OverSequence):
    def __init__(self) -> None:
        super().__init__(nn.GRU(WIDTH, 5, num_layers=2, batch_first=True), 5)

    def run(self, x: Tensor) -> Tensor:
        self.layer.flatten_parameters()
        return super().run(x)


@kind("RNNCell")
class Cells(OverSequence):
    """A cell that is called once per step of the sequence, which has another length in each batch."""

    def __init__(self) -> None:
        super().__init__(nn.RNNCell(WIDTH, WIDTH))

    def forward(self, batch: Tensor) -> Tensor:
        x, step, _ = rows(batch)
        hidden = torch.zeros(ROWS, WIDTH)
        for _ in range(step + 1):
            hidden = self.layer(self.first(x), hidden)
        return self.last(hidden)


@kind("MultiheadAttention")
class Attention(OverSequence):
    """`nn.MultiheadAttention` reads the weight of its child `out_proj` and never calls it."""

    def __init__(self) -> None:
        super().__init__(nn.MultiheadAttention(WIDTH, 2, batch_first=True))

    def run(self, x: Tensor) -> Tensor:
        y, _ = self.layer(x, x, x)
        return y


@kind()
class AttentionInRoot(Attention):
    pass


@kind("TransformerEncoderLayer", "TransformerDecoderLayer")
class EncoderDecoder(OverSequence):
    def __init__(self) -> None:
        super().__init__(nn.Transformer(WIDTH, 2, 2, 2, 5, dropout=0.0, batch_first=True))

    def run(self, x: Tensor) -> Tensor:
        return self.layer(x, x.flip(1))


@kind("ManyLayers")
class Layers(Stack):
    """Layers with parameters of their own kind, in lists and dicts of parameters."""

    def __init__(self) -> None:
        super().__init__(ManyLayers)
        self.tables = nn.ParameterDict({"a": torch.randn(WIDTH), "b": torch.randn(WIDTH)})

    def forward(self, batch: Tensor) -> Tensor:
        return super().forward(batch) * self.tables["a"] + self.tables["b"]


class ManyLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.bag = nn.EmbeddingBag(5, WIDTH)
        self.prelu = nn.PReLU()
        self.list = nn.ParameterList(torch.randn(WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.prelu(self.bilinear(x, self.prelu(x)))
        x = x + self.bag((x.detach() * 9).long().remainder(5))
        for parameter in self.list:
            x = x * parameter
        return x


@kind("TransformerEncoderLayer")
class ViT(nn.Module):
    """Patches with a class token and positions, encoder blocks, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 2, stride=2)
        self.token = Parameter(torch.randn(1, 1, 8))
        self.positions = Parameter(torch.randn(1, 5, 8))
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 11, dropout=0.0, batch_first=True, norm_first=True),
            2,
            enable_nested_tensor=False,
        )
        self.head = nn.Linear(8, WIDTH)

    def forward(self, batch: Tensor) -> Tensor:
        x = rows(batch).x
        patches = self.patches(x[:, None, :, None] * x[:, None, None, :]).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(ROWS, -1, -1), patches], dim=1) + self.positions
        return self.head(self.encoder(x)[:, 0])


class Parametrized(nn.Module):
    """A layer whose weight a parametrization computes from others."""

    def __init__(self, parametrize: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        with torch.no_grad():  # the old weight norm keeps the weight it has computed, and a graph does not deepcopy
            self.layer = parametrize(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


@kind("Parametrized", parametrization="orthogonal")
@kind("Parametrized", parametrization="spectral_norm")
@kind("Parametrized", parametrization="weight_norm")
@kind("Parametrized", parametrization="old_weight_norm")
@kind("Parametrized", parametrization="old_spectral_norm")
class Parametrizations(Stack):
    WAYS: ClassVar[dict[str, Callable[[nn.Module], nn.Module]]] = {
        "orthogonal": parametrizations.orthogonal,
        "spectral_norm": parametrizations.spectral_norm,
        "weight_norm": parametrizations.weight_norm,
        "old_weight_norm": nn.utils.weight_norm,
        "old_spectral_norm": nn.utils.spectral_norm,
    }

    def __init__(self, parametrization: str) -> None:
        super().__init__(lambda: Parametrized(self.WAYS[parametrization]))


# ------------------------------------------------------------------------------------------- what units take and return


class Pair(NamedTuple):
    x: Tensor
    extra: Tensor


@dataclasses.dataclass
class Result:
    x: Tensor
    extra: Tensor | None = None


class Holder:
    """An ordinary object with tensors in it."""

    def __init__(self, x: Tensor) -> None:
        self.inside = {"x": [x]}


class Returning(Block):
    """Returns its result in a container, and may leave it on itself as well."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.left: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        match self.form:
            case "tuple":
                return x, y
            case "dict":
                return {"y": y, "none": None, "nested": {"x": x}}
            case "namedtuple":
                return Pair(y, x)
            case "dataclass":
                return Result(y)
            case "object":
                return Holder(y)
            case "none":
                self.left = y
                return None
            case "generator":
                return (row for row in y)
            case _:
                assert self.form == "iterator"
                return map(self.up, x)

    def take(self, result: Any) -> Tensor:
        match self.form:
            case "tuple":
                return result[0] + result[1]
            case "dict":
                return result["y"] + result["nested"]["x"]
            case "namedtuple" | "dataclass":
                return result.x
            case "object":
                return result.inside["x"][0]
            case "none":
                y, self.left = self.left, None
                assert y is not None
                return y
            case "generator":
                return torch.stack(list(result))
            case _:
                return torch.stack(list(result))[:, :WIDTH]


@kind("Returning", form="tuple")
@kind("Returning", form="dict")
@kind("Returning", form="namedtuple")
@kind("Returning", form="dataclass")
@kind("Returning", form="object")
@kind("Returning", form="none")
@kind("Returning", form="generator")
@kind("Returning", form="iterator")
class Returns(Stack):
    def __init__(self, form: str) -> None:
        super().__init__(lambda: Returning(form))

    def forward(self, batch: Tensor) -> Tensor:
        x = self.first(rows(batch).x)
        for block in self.blocks:
            x = block.take(block(x))
        return self.last(x)


class OddBlock(Block):
    """A unit called in an unusual way, or with an unusual result."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, *args: Any, x: Tensor | None = None, rest: Sequence[Any] = ()) -> Tensor:
        if x is None:
            (x,) = args
        match self.way:
            case "keyword":
                return super().forward(x) + rest[0]["deep"]
            case "detached":
                return super().forward(x).detach()
            case "view":
                super().forward(x)
                return x.view(-1)
            case "inplace":
                return super().forward(x).mul_(2.0).add_(x)
            case "input_changed":
                return x.add_(super().forward(x.clone()).square())
            case _:
                assert self.way == "without_grad"
                with torch.no_grad():
                    return super().forward(x)


@kind("OddBlock", way="keyword")
@kind("OddBlock", way="detached")
@kind("OddBlock", way="view")
@kind("OddBlock", way="inplace")
@kind("OddBlock", way="input_changed")
@kind("OddBlock", way="without_grad")
class Odd(Stack):
    def __init__(self, way: str) -> None:
        super().__init__(lambda: OddBlock(way))

    def forward(self, batch: Tensor) -> Tensor:
        first = self.first(rows(batch).x)
        x = first
        for block in self.blocks:
            y = block(x=x * 1.0, rest=[{"deep": first}])
            x = y.view(x.shape) + first
        return self.last(x.clone().mul_(0.5))


# ------------------------------------------------------------------------------------------------- how autograd is used


@kind("Block", way="nested")
@kind("Block", way="selective")
@kind("Block", way="of_the_stack")
@kind("Block", way="reentrant")
@kind("Block", exact=False, way="reentrant_twice")
class Checkpointing(Stack):
    """Activations that are computed again in backward."""

    def __init__(self, way: str) -> None:
        super().__init__(depth=3)
        self.way = way

    def forward(self, batch: Tensor) -> Tensor:
        x = self.first(rows(batch).x)
        match self.way:
            case "nested":
                x = checkpoint(self.pair, x, use_reentrant=False)
                x = checkpoint(self.blocks[2], x, use_reentrant=False)
            case "selective":
                contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            case "of_the_stack":
                x = checkpoint(nn.Sequential(*self.blocks), x, use_reentrant=False)
            case "reentrant":
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant=True)
            case _:
                assert self.way == "reentrant_twice"
                for block in [*self.blocks, *self.blocks]:
                    x = checkpoint(block, x, use_reentrant=True)
        return self.last(x)

    def pair(self, x: Tensor) -> Tensor:
        return checkpoint(self.blocks[1], self.blocks[0](x), use_reentrant=False)


def save_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


class Product(torch.autograd.Function):
    """Saves the parameter that it multiplies with."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


class Kept(torch.autograd.Function):
    """Keeps the parameter itself, not as a saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    backward = staticmethod(lambda ctx, grad: (grad @ ctx.weight, grad.t() @ ctx.x))


class FunctionBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + Kept.apply(torch.tanh(Product.apply(x, self.up.weight)), self.down.weight)


@kind("FunctionBlock")
class Functions(Stack):
    """Operations of the user's own, on parameters of modules that are never called."""

    def __init__(self) -> None:
        super().__init__(FunctionBlock)
        for block in self.blocks:
            for layer in (block.up, block.down):
                layer.bias = None


class CallBlock(Block):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x * 2.0) * 0.5


@kind("CallBlock")
class Called(Stack):
    """Modules with a `__call__` of their own."""

    def __init__(self) -> None:
        super().__init__(CallBlock)


@kind("Block")
class Penalized(Stack):
    """The forward takes a gradient with respect to the output of a unit, and goes on with it."""

    def forward(self, batch: Tensor) -> Tensor:
        x = self.first(rows(batch).x)
        middle = self.blocks[0](x)
        y = self.last(self.blocks[1](middle))
        (slope,) = torch.autograd.grad(y.square().sum(), middle, create_graph=True)
        return y + slope.square()


@kind("Block")
class Guided(Stack):
    """The gradient with respect to a unit's output is a constant of the rest."""

    def forward(self, batch: Tensor) -> Tensor:
        x = self.first(rows(batch).x).detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.blocks[1](self.blocks[0](x)).square().sum(), x)
        return super().forward(batch) * slope


class HookedBlock(Block):
    """The user's hooks on a unit and inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []
        self.register_forward_pre_hook(double_input, with_kwargs=True)
        self.register_forward_hook(halve_output)
        self.up.register_forward_hook(add_norm_of_weight)
        self.register_full_backward_pre_hook(double_gradient)
        self.register_full_backward_hook(halve_gradient)


def double_input(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tuple(2.0 * arg for arg in args), kwargs


def halve_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 0.5 * output * module.get_parameter("up.weight").sum()


def add_norm_of_weight(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + module.get_parameter("weight").square().sum()


def double_gradient(module: nn.Module, gradients: Any) -> Any:
    return tuple(2.0 * gradient for gradient in gradients)


def halve_gradient(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(0.5 * gradient * module.get_parameter("down.bias").sum() for gradient in inputs)


@kind("HookedBlock")
class Hooked(Stack):
    def __init__(self) -> None:
        super().__init__(HookedBlock)


@kind("ReadingBlock")
class ReadsChild(Stack):
    """The root reads parameters of its layers, a unit those of its own, without calling the modules."""

    def __init__(self) -> None:
        super().__init__(ReadingBlock)

    def forward(self, batch: Tensor) -> Tensor:
        x = functional.linear(rows(batch).x, self.first.weight)
        for block in self.blocks:
            x = block(x)
        return functional.linear(x, self.last.weight * self.first.bias)


class ReadingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + functional.linear(x, self.down.weight @ self.up.weight) * self.down.bias


# -------------------------------------------------------------------------------------------------------------- buffers


class BufferBlock(Block):
    """Buffers that forward replaces, changes in place, shares, does not save; one is expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("replaced", torch.zeros(WIDTH))
        self.register_buffer("counted", torch.tensor(0))
        self.register_buffer("again", self.counted)
        self.register_buffer("unsaved", torch.ones(WIDTH), persistent=False)
        self.register_buffer("expanded", torch.ones(1).expand(WIDTH))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * self.unsaved.clone() * self.expanded + self.replaced
        self.replaced = 0.9 * self.replaced + 0.1 * y.detach().mean(0)
        self.counted += 1
        self.unsaved.mul_(1.01)
        return y * self.again


@kind("BufferBlock")
class Buffers(Stack):
    def __init__(self) -> None:
        super().__init__(BufferBlock)


def own_buffers(model: nn.Module) -> dict[str, Tensor]:
    """All buffers by name, also those that are not saved."""
    return {name: buffer.clone() for name, buffer in model.named_buffers(remove_duplicate=False)}
