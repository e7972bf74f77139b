"""Which optimizers run over shards."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import models, whole
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero import Muon
from lightning_zero.update import examine
from lightning_zero.update.choice import kept_whole
from lightning_zero.update.rules import ELEMENT_WISE, REFUSED
from lightning_zero.update.shell import ShellGroup, run_step

CPU = torch.device("cpu")
Rule = Callable[[Optimizer, Tensor, dict[str, Any], dict[str, Any]], None]


class UserOptimizer(Optimizer):
    """Applies `rule` to each parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def rule(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.rule(parameter, self.state[parameter], group)


class SignMomentum(UserOptimizer):
    """Element-wise, as Lion."""

    def rule(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = 0
            state["momentum"] = torch.zeros_like(parameter)
        state["step"] += 1
        state["momentum"].mul_(0.9).add_(parameter.grad)
        parameter.add_(state["momentum"].sign(), alpha=-group["lr"] / state["step"])


class TrustRatio(UserOptimizer):
    """Scales by norms of the whole parameter, as LAMB and LARS."""

    def rule(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        ratio = parameter.norm() / parameter.grad.norm()
        parameter.add_(parameter.grad * ratio, alpha=-group["lr"])


class Counted(UserOptimizer):
    """Keeps its step count in itself and counts calls: a call per tile would count too often."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        super().step()

    def rule(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.add_(parameter.grad, alpha=-group["lr"] / self.calls)


class CountedInGroup(UserOptimizer):
    """Keeps its step count in the group, as schedule-free optimizers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step()

    def rule(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.add_(parameter.grad, alpha=-group["lr"] / group["k"])


class CountsUpdates(Counted):
    """Counts parameters too."""

    def rule(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.calls += 1


class CountsInPlace(CountedInGroup):
    """Of two shells of one group the second would find what the first has left."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count = torch.zeros(())

    def rule(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.count += 1


class WritesNorm(UserOptimizer):
    """Keeps what it has seen of gradients in the group."""

    def rule(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["norm"] = float(parameter.grad.norm())


class ByShape(UserOptimizer):
    """Treats matrices in another way than vectors, as Muon with a fallback."""

    def rule(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        update = parameter.grad.sign() if parameter.dim() == 2 else parameter.grad
        parameter.add_(update, alpha=-group["lr"])


class NeedsMatrices(UserOptimizer):
    def rule(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.add_(parameter.grad @ parameter.grad.mT @ parameter.grad, alpha=-group["lr"])


class OnBrokenDevice(UserOptimizer):
    """The first to wait for a device, it hears what failed there before."""

    error: Exception

    def rule(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise self.error


class Smoothed(UserOptimizer):
    """Reads the neighbouring elements."""

    def rule(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.add_(parameter.grad.roll(1), alpha=-group["lr"])


class QuantizesLarge(UserOptimizer):
    """Rounds what is large to the greatest of 256 elements, as 8-bit optimizers."""

    def rule(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        update = parameter.grad
        if update.numel() >= 4096 and update.numel() % 256 == 0:
            update = update.reshape(-1, 256).amax(1, keepdim=True).expand(-1, 256).reshape(update.shape)
        parameter.add_(update, alpha=-group["lr"])


class ByLength(UserOptimizer):
    """Element-wise, but for the kind of its state."""

    def rule(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        kind = torch.bfloat16 if parameter.numel() >= 4096 and parameter.numel() % 256 == 0 else torch.float32
        state.setdefault("seen", torch.zeros_like(parameter, dtype=kind))
        parameter.add_(parameter.grad, alpha=-group["lr"])


class Late(UserOptimizer):
    """Begins to precondition after its hundredth step, as Shampoo of some libraries."""

    def rule(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        factor = state.setdefault("factor", torch.eye(len(parameter)))
        parameter.add_(parameter.grad if state["step"] < 100 else factor @ parameter.grad, alpha=-group["lr"])


class Rectified(TrustRatio):
    """Moves nothing before its sixth step, as LAMB with a rectified rate."""

    def rule(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        if state["step"] > 5:
            super().rule(parameter, state, group)


class AveragesNorms(UserOptimizer):
    """Enlarges small gradients to an average of their norms, which begins at 0, as AdaNorm."""

    def rule(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        norm = parameter.grad.norm()
        state["norm"] = 0.95 * state.get("norm", torch.zeros(())) + 0.05 * norm
        parameter.add_(parameter.grad * max(1.0, float(state["norm"] / norm)), alpha=-group["lr"])


class CopiesNeighbours(UserOptimizer):
    """Keeps what only its hundredth step reads."""

    def rule(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        state["rolled"] = parameter.grad.roll(1)
        parameter.add_(parameter.grad if state["step"] < 100 else state["rolled"], alpha=-group["lr"])


class Prodigy(UserOptimizer):
    """Takes its rate from all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for parameter in parameters:
            parameter.sub_(parameter.grad / norm)


class Clips(QuantizesLarge):
    """Clips by the norm of all gradients, if that is larger than 20."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm() if gradients else 0.0
        for gradient in gradients:
            gradient.mul_(min(1.0, 20 / float(norm)))
        super().step()


class ClipsSmoothed(Clips):
    rule = Smoothed.rule


class Pairs(Smoothed):
    """Multiplies two parameters, as rules of low-rank adapters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for left, right in itertools.pairwise(group["params"]):
                left.grad = left.grad @ right
        super().step()


class Noisy(UserOptimizer):
    def rule(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.add_(torch.rand_like(parameter), alpha=-group["lr"])


class Twice(UserOptimizer):
    """Evaluates the loss where it has moved to, as SAM."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        closure()
        closure()


class Wraps(UserOptimizer):
    """Steps another optimizer, as SAM and Lookahead of some libraries."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.inner = {"base": torch.optim.AdamW(self.param_groups)}

    def step(self, closure: Any = None) -> None:
        self.inner["base"].step()


class HasUnrelated(SignMomentum):
    """Has an optimizer of something else, such as an adversary."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.other = torch.optim.AdamW(weights())


class Paged(SignMomentum):
    """Says of itself what the paged optimizers of bitsandbytes do."""

    is_paged = True


class Quantized(Tensor):
    """A tensor class of its own, as torchao's."""


class KeepsSubclass(UserOptimizer):
    def rule(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("momentum", torch.zeros_like(parameter).as_subclass(Quantized))
        parameter.add_(parameter.grad, alpha=-group["lr"])


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(6))]


KNOWN = sorted(cls.__name__ for cls in ELEMENT_WISE)


@pytest.mark.parametrize("name", KNOWN)
def test_torch_optimizers_on_the_list_update_parts_as_wholes(name: str) -> None:
    cls = getattr(torch.optim, name)
    assert examine(cls(weights(), lr=0.05), CPU).whole == (False,)
    # The list is a promise: a subclass, which is not on it, is tried.
    subclass = type(f"My{name}", (cls,), {})
    assert examine(subclass(weights(), lr=0.05), CPU).whole == (False,)


@pytest.mark.parametrize("name", models.OPTIMIZERS)
def test_every_configuration_is_element_wise_over_any_cut(name: str) -> None:
    cls, options = models.OPTIMIZERS[name]
    whole = nn.Parameter(torch.linspace(-1, 1, 60).view(6, 10))
    parts = [p.clone() for p in whole.detach().view(-1).split([1, 16, 33, 10])]
    optimizer = cls([whole], **options)
    hyperparameters = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    state = {part: fresh_state(optimizer, whole, part) for part in parts}
    for step in range(4):
        whole.grad = torch.sin(torch.arange(60.0) * (step + 1)).view(6, 10)
        for part, gradient in zip(parts, whole.grad.view(-1).split([1, 16, 33, 10]), strict=True):
            part.grad = gradient
        optimizer.step()
        run_step(optimizer, [ShellGroup(parts, hyperparameters)], state)
    assert torch.equal(torch.cat(parts), whole.detach().view(-1))


def fresh_state(optimizer: Optimizer, whole: Tensor, part: Tensor) -> dict[str, Any]:
    """What the constructor made (Adagrad), for a part."""
    made = optimizer.state.get(whole, {})
    return {k: v.new_full(part.shape, v.flatten()[0]) if v.dim() else v.clone() for k, v in made.items()}


@pytest.mark.parametrize("name", REFUSED)
def test_torchs_own_that_cannot_be_sharded_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} cannot run over shards: it.*torch\.optim\.AdamW.*'ddp'"):
        examine(getattr(torch.optim, name)(weights()), CPU)


@pytest.mark.parametrize("name", whole.WHOLE)
def test_optimizers_of_whole_parameters_are_found_by_trial(name: str) -> None:
    found = examine(whole.make(name, models.make_model("mlp")), CPU).whole
    assert found == ((True, False) if name == "muon_and_adamw" else (True, True))


def test_numbers_are_parameters_too() -> None:
    """Such as the scale of CLIP's logits: a tensor without dimensions."""
    scale, matrix = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(4, 4))
    assert kept_whole([Muon([scale, matrix])], torch.device("cpu")) == [matrix]


def test_no_torch_optimizer_is_unheard_of() -> None:
    """Of a new class in torch someone must know what it needs."""
    classes = {v for v in vars(torch.optim).values() if isinstance(v, type) and issubclass(v, Optimizer)}
    unknown = {cls.__name__ for cls in classes - {Optimizer} - ELEMENT_WISE} - REFUSED.keys()
    assert unknown == {"Adafactor", "Muon"}  # which are tried


# Warm-ups begin at 0, where no rule moves anything.
at_any_rate = pytest.mark.parametrize("rate", [0.1, 0.0, torch.tensor(1e-12)], ids=["rate", "no rate", "tiny rate"])


@at_any_rate
def test_an_element_wise_user_class_is_accepted(rate: Any) -> None:
    traits = examine(SignMomentum(weights(), rate), CPU)
    assert (traits.whole, traits.per_element) == ((False,), {"momentum"})


@at_any_rate
@pytest.mark.parametrize(
    "cls",
    [
        TrustRatio,
        ByShape,
        Smoothed,
        NeedsMatrices,
        QuantizesLarge,
        ByLength,
        Late,
        Rectified,
        AveragesNorms,
        CopiesNeighbours,
    ],
)
def test_a_user_class_that_reads_other_elements_needs_whole_parameters(cls: type[UserOptimizer], rate: Any) -> None:
    assert examine(cls(weights()[:1], rate), CPU).whole == (True,)


def test_each_group_is_tried_by_itself() -> None:
    matrix, vector = weights()
    assert examine(ByShape([{"params": [vector]}, {"params": [matrix]}]), CPU).whole == (False, True)


@pytest.mark.parametrize("cls", [Prodigy, Noisy, Clips, ClipsSmoothed])
def test_a_rule_by_which_parameters_depend_on_each_other_is_refused(cls: type[UserOptimizer]) -> None:
    with pytest.raises(ValueError, match=rf"{cls.__name__} .*depends on the others.*random numbers.*up to \d.*'ddp'"):
        examine(cls(weights()), CPU)


def test_a_rule_that_fails_on_parameters_together_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Pairs .*alone, but not together with others: mat1 and mat2.*'ddp'"):
        examine(Pairs(weights()[:1]), CPU)


def test_a_loss_that_is_evaluated_again_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Twice .*evaluates the loss 2 times in a step.*'ddp'"):
        examine(Twice(weights()), CPU)


def test_a_wrapper_of_another_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Wraps cannot run over shards: it has another optimizer.*AdamW.*'ddp'"):
        examine(Wraps(weights()), CPU)
    assert examine(HasUnrelated(weights()), CPU).whole == (False,)


def test_a_paged_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^Paged cannot run .*is_paged=True.*without paging.*'zero2_offload'.*'ddp'"):
        examine(Paged(weights()), CPU)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PagedAdamW", "PagedLion8bit", "PagedAdEMAMix"])
def test_those_of_bitsandbytes_say_so_and_run_without_paging(name: str) -> None:
    optimizers = pytest.importorskip("bitsandbytes").optim
    with pytest.raises(ValueError, match=rf"^{name} cannot run over shards: .*is_paged=True"):
        examine(getattr(optimizers, name)(weights()), CPU)
    examine(getattr(optimizers, name.removeprefix("Paged"))(weights()), CPU)


def test_state_of_a_tensor_class_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match=r"keeps 'momentum' as a Quantized.*CPUAdamW\(state_dtype.*'ddp'"):
        examine(KeepsSubclass(weights()), CPU)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Adam8bit", "AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_state_of_torchao_is_refused(name: str) -> None:
    optimizers = pytest.importorskip("torchao.optim")
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(ValueError, match=rf"{name} .*keeps 'exp_avg' as a OptimState(4bit|8bit|Fp8)"),
    ):
        examine(getattr(optimizers, name)(weights()), CPU)


@pytest.mark.slow
def test_what_bitsandbytes_overrides_for_a_parameter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(bnb.optim.GlobalOptimManager, "_instance", None)
    stable, matrix = bnb.nn.Embedding(16, 8).weight, nn.Parameter(torch.ones(16, 16))
    told = r"overrides \{'%s': %s\} for a parameter of shape \(16, %d\).*a second optimizer.*'ddp'"
    with pytest.raises(ValueError, match="AdamW8bit: .*" + told % ("optim_bits", 32, 8)):
        examine(bnb.optim.AdamW8bit([matrix, stable], min_8bit_size=64), CPU)
    # As the message says:
    examine(bnb.optim.AdamW8bit([matrix], min_8bit_size=64), CPU)
    examine(bnb.optim.AdamW([stable], optim_bits=32), CPU)
    bnb.optim.GlobalOptimManager.get_instance().override_config(matrix, "lr", 0.5)
    with pytest.raises(ValueError, match=told % ("lr", 0.5, 16)):
        examine(bnb.optim.AdamW8bit([matrix], min_8bit_size=64), CPU)


@pytest.mark.parametrize("cls", [Counted, CountedInGroup])
def test_a_step_may_be_counted_outside_the_state(cls: type[UserOptimizer]) -> None:
    traits = examine(cls(weights()), CPU)
    assert (traits.whole, traits.counts) == ((False,), True)
    assert not examine(SignMomentum(weights()), CPU).counts


@pytest.mark.parametrize("cls", [CountsUpdates, CountsInPlace, WritesNorm])
def test_what_depends_on_the_update_is_refused_outside_the_state(cls: type[UserOptimizer]) -> None:
    with pytest.raises(ValueError, match=rf"{cls.__name__} keeps state outside `state`"):
        examine(cls(weights()), CPU)


def test_a_user_class_that_fails_on_whole_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match=r"NeedsMatrices could not update a parameter of shape \(24,\)"):
        examine(NeedsMatrices(weights()), CPU)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("a test's"),
        RuntimeError("[x/gloo/y] Timed out"),
        RuntimeError("Application timeout caused pair closure"),
    ],
    ids=["memory", "timeout", "after a timeout"],
)
def test_failures_of_a_device_and_of_other_ranks_are_not_the_class_s(error: Exception) -> None:
    optimizer = OnBrokenDevice(weights())
    optimizer.error = error
    with pytest.raises(RuntimeError) as raised:
        examine(optimizer, CPU)
    assert raised.value is error


@pytest.mark.parametrize("value", [None, "adamw", nn.Linear(2, 2), object()])
def test_what_is_no_optimizer_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"is not a torch\.optim\.Optimizer"):
        examine(value, CPU)


@pytest.mark.parametrize(
    ("optimizer", "names"),
    [
        ("adamw", {"exp_avg", "exp_avg_sq"}),
        ("amsgrad", {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
        ("momentum", {"momentum_buffer"}),
        ("sgd", set()),
        ("adagrad", {"sum"}),
        ("rmsprop", {"square_avg", "momentum_buffer", "grad_avg"}),
        ("adadelta", {"square_avg", "acc_delta"}),
    ],
)
def test_the_names_of_per_element_state_are_found(optimizer: str, names: set[str]) -> None:
    made = models.make_optimizer(optimizer, models.make_model("mlp"))
    assert examine(made, CPU).per_element == names


@pytest.mark.parametrize("name", ["adamw", "adagrad", "momentum", "muon", "shampoo"])
def test_the_probe_changes_nothing(name: str) -> None:
    model = models.make_model("mlp")
    optimizer = models.make_optimizer(name, model)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    seed = torch.get_rng_state()
    examine(optimizer, CPU)
    after = (model.state_dict(), optimizer.state_dict())
    assert str(after) == str(before)
    assert torch.equal(torch.get_rng_state(), seed)
    assert all(p.grad is None for p in model.parameters())
