"""Makes models for `lightning-zero estimate` on the meta device: from a class, a folder of transformers, or sizes."""

from __future__ import annotations

import inspect
import logging
import math
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.cli.text import in_a_line
from lightning_zero.engine import ActivationLimits
from lightning_zero.integration.precision import ZeroPrecision
from lightning_zero.planning.examples import loss_of, zeros_as
from lightning_zero.planning.tracing import Loss, Trace, TraceError, trace
from lightning_zero.planning.transformer import Sizes, trace_of
from lightning_zero.sharding.partition import check_supported
from lightning_zero.torch_private import tree_leaves

_DTYPES = {
    "long": torch.int64,
    "int": torch.int32,
    "float": torch.float32,
    "bool": torch.bool,
}
_MOST = 2**60  # elements of a tensor: bytes are counted in 64 bits
_LONGEST = 2048  # tokens of an example, if no length is given


class EstimateError(ValueError):
    """The arguments do not make a model; the message says why."""


@dataclass(frozen=True)
class Imagined:
    """A model without memory.

    Attributes:
        name: name of the model.
        module: the module, on the meta device.
        trace: trace of a micro-batch; None if the batch is not known.
        note: source of the trace, or the reason why there is none.
    """

    name: str
    module: nn.Module
    trace: Trace | None
    note: str


def from_sizes(
    params: int,
    layers: int,
    hidden: int,
    vocabulary: int,
    batch: int,
    sequence: int | None,
    precision: ZeroPrecision,
    recompute: bool,
    activations: ActivationLimits | None = None,
) -> Imagined:
    """Makes a transformer that is given by its sizes.

    Raises:
        EstimateError: the sizes contradict each other.
    """
    try:
        with torch.device("meta"):
            module = Sizes(params, layers, hidden, vocabulary)
    except ValueError as error:
        raise EstimateError(str(error)) from error
    except (RuntimeError, TypeError, OverflowError) as error:
        raise EstimateError(
            f"--params {params:.3g} --layers {layers} --hidden {hidden} --vocab {vocabulary} make a tensor that is "
            f"larger than any can be: {in_a_line(error)}"
        ) from error
    sequence = sequence or _LONGEST
    wide = precision.policy.param_dtype not in (torch.bfloat16, torch.float16)
    return Imagined(
        f"a transformer of {sum(p.numel() for p in module.parameters()):.3g} parameters",
        module,
        trace_of(module, batch, sequence, wide, recompute, activations),
        f"an estimate for {batch} x {sequence} tokens, by the formula of Korthikanti et al., 2022",
    )


def from_transformers(
    path: Path,
    batch: int,
    sequence: int | None,
    precision: ZeroPrecision,
    recompute: bool,
    activations: ActivationLimits | None = None,
) -> Imagined:
    """Makes the model of a `config.json`.

    Raises:
        EstimateError: transformers is not installed, or cannot make the model.
    """
    try:
        import transformers
    except ImportError as error:
        raise EstimateError("--hf needs transformers: pip install transformers") from error
    folder = path.parent if path.name == "config.json" else path
    file = folder / "config.json"
    if not file.is_file():
        raise EstimateError(f"--hf {path} has no config.json; expected the folder of a model of transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)  # token ids and names of losses do not matter here
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        kinds = config.architectures or []
        kind = getattr(transformers, kinds[0], None) if kinds else transformers.AutoModelForCausalLM
        if kind is None:
            raise EstimateError(f"transformers {transformers.__version__} has no class {kinds[0]}, which {file} names")
        make: Callable[[Any], Any] = kind if kinds else kind.from_config
        with torch.device("meta"):
            module: nn.Module = make(config).float().train()
        if recompute:
            _recompute(module)
        sizes, loss = _loss_of_transformers(config, batch, sequence)
    except EstimateError:
        raise
    except Exception as error:  # a file can hold anything, and transformers raises what comes of it
        raise EstimateError(f"no model can be made of {file}: {in_a_line(error)}") from error
    return _traced(kind.__name__, module, loss, sizes, precision, activations)


def _recompute(module: Any) -> None:
    """Turns checkpointing on, by the name that this version of transformers has for it."""
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    next(getattr(module, name) for name in names if hasattr(module, name))()


def _loss_of_transformers(config: Any, batch: int, sequence: int | None) -> tuple[str, Loss]:
    if getattr(config, "image_size", None) is not None and getattr(config, "vocab_size", None) is None:
        shape = (batch, config.num_channels, *_pair(config.image_size))

        def of_images(module: nn.Module) -> Tensor:
            return _loss_in(module(pixel_values=torch.zeros(shape), labels=torch.zeros(batch, dtype=torch.long)))

        return "x".join(map(str, shape)), of_images
    longest = getattr(config, "max_position_embeddings", None) or _LONGEST
    tokens = (batch, sequence or min(longest, _LONGEST))

    def of_text(module: nn.Module) -> Tensor:
        words = torch.zeros(tokens, dtype=torch.long)
        return _loss_in(module(input_ids=words, labels=words, use_cache=False))

    beyond = f", of which config.json allows {longest}" if tokens[1] > longest else ""
    return f"{tokens[0]} x {tokens[1]} tokens{beyond}", of_text


def _loss_in(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise EstimateError(
            f"the model returns a {type(output).__name__} without a loss; name a class with a head for its task in "
            "`architectures` of its config.json, such as BertForMaskedLM"
        )
    return loss


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def from_class(
    target: str | None,
    arguments: Mapping[str, Any],
    inputs: Sequence[str],
    batch: int,
    sequence: int | None,
    precision: ZeroPrecision,
    activations: ActivationLimits | None = None,
) -> Imagined:
    """Makes a model of a class, and traces it on a batch of the given form.

    Args:
        target: "package.module:Class"; None: `_target_` of the arguments.
        arguments: arguments of the constructor; arguments with a `_target_` are instantiated.
        inputs: forms of tensors, see :func:`parse_input`. Without any, forward runs on the module's
            `example_input_array`, and the first size of each of its tensors becomes ``batch``.
        batch: value of B in a form.
        sequence: value of T in a form.
        precision: precision of the run.
        activations: limits of activations in host memory; None: none rest there.

    Raises:
        EstimateError: there is no such class, or the model cannot be made.
    """
    from hydra.utils import instantiate

    dotted = target.replace(":", ".") if target else arguments.get("_target_")
    if dotted and not re.fullmatch(r"\w+(\.\w+)+", str(dotted)):
        raise EstimateError(f"{target or dotted!r} is not the path of a class, such as package.module:Class")
    if not dotted:
        raise EstimateError(
            "nothing says which class it is; give --model package.module:Class, or _target_ in --config"
        )
    sys.path.insert(0, "")  # the folder where the command runs, as with python -m
    try:
        with torch.device("meta"):
            module = instantiate({**arguments, "_target_": dotted})
    except (Exception, SystemExit) as error:  # of the user's module, which can do anything
        raise EstimateError(f"{dotted} cannot be made: {in_a_line(_first(error))}") from error
    if not isinstance(module, nn.Module):
        raise EstimateError(f"{dotted} makes a {type(module).__name__}; expected a torch.nn.Module")
    _check_parameters(dotted, module)
    makers = [parse_input(text, batch, sequence) for text in inputs]
    example = getattr(module, "example_input_array", None)
    loss = _loss_of_class(makers) if makers else lambda twin: loss_of(twin, zeros_as(example, "cpu", batch))
    with torch.device("meta"):
        made = [make() for make in makers] or tree_leaves(zeros_as(example, "meta", batch))
    sizes = ", ".join("x".join(map(str, tensor.shape)) for tensor in made if isinstance(tensor, Tensor))
    if not sizes:
        note = "without activations: no --input says what a batch is, and the module has no example_input_array"
        return Imagined(dotted, module, None, note)
    return _traced(dotted, module.train(), loss, sizes, precision, activations)


def _first(error: BaseException) -> BaseException:
    """Finds the first error of a chain, since Hydra and imports raise further ones from it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _check_parameters(name: str, module: nn.Module) -> None:
    """Refuses a model that cannot be planned.

    Raises:
        EstimateError: a parameter cannot be planned; the message names it.
    """
    try:
        check_supported(module)
    except TypeError as error:
        raise EstimateError(f"{name} cannot be sharded: {error}") from error
    if not any(p.requires_grad for p in module.parameters()):
        raise EstimateError(f"{name} has no parameter that requires a gradient: there is nothing to train")


def parse_input(text: str, batch: int, sequence: int | None) -> Callable[[], Tensor]:
    """Reads the form of a tensor, such as "long:BxT" or "float:Bx3x224x224"; returns a function that makes its zeros.

    Raises:
        EstimateError: the text is not such a form, or it has a T and the length of a sequence is not given.
    """
    match = re.fullmatch(rf"({'|'.join(_DTYPES)}):((?:B|T|\d+)(?:x(?:B|T|\d+))*)", text)
    if match is None:
        raise EstimateError(
            f"--input {text!r} is not the form of a tensor; expected a dtype ({', '.join(_DTYPES)}) and sizes, B for "
            "--batch and T for --seq, such as long:BxT or float:Bx3x224x224"
        )
    if sequence is None and "T" in match[2]:
        raise EstimateError(f"--input {text!r} has a T; give --seq")
    shape = [{"B": batch, "T": sequence}.get(size) or int(size[:20]) for size in match[2].split("x")]
    if math.prod(shape) > _MOST:
        raise EstimateError(f"--input {text!r} has more elements than a tensor can; expected at most {_MOST:.3g}")
    dtype = _DTYPES[match[1]]
    return lambda: torch.zeros(shape, dtype=dtype)


def _loss_of_class(makers: Sequence[Callable[[], Tensor]]) -> Loss:
    def loss(module: nn.Module) -> Tensor:
        tensors = [make() for make in makers]
        step = getattr(module, "training_step", None)
        if step is None:
            return _scalar(module(*tensors))
        batch = tensors[0] if len(tensors) == 1 else tuple(tensors)
        return _scalar(step(batch, 0) if len(inspect.signature(step).parameters) > 1 else step(batch))

    return loss


def _scalar(output: Any) -> Tensor:
    """Returns the loss from the result of a step, or the mean of an output."""
    value = output
    if isinstance(output, Mapping):
        value = output.get("loss")
    elif isinstance(output, tuple):
        value = next(iter(output), None)
    if not isinstance(value, Tensor):
        kind = type(output).__name__
        raise EstimateError(f"the model returns a {kind} without a loss; expected a tensor, or a mapping with 'loss'")
    return value if value.ndim == 0 else value.float().mean()


def _traced(
    name: str,
    module: nn.Module,
    loss: Loss,
    sizes: str,
    precision: ZeroPrecision,
    activations: ActivationLimits | None,
) -> Imagined:
    _check_parameters(name, module)

    def in_precision(twin: nn.Module) -> Tensor:
        with precision.computing_on("cpu"):
            return loss(twin)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a Trainer that is not there, and the like
            logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it logs what is raised
            made = trace(module, in_precision, precision.policy, activations=activations)
    except EstimateError:
        raise
    except TraceError as error:
        raise EstimateError(f"{name} cannot run on {sizes} without values: {error}") from error
    except Exception as error:  # of the user's module, which can do anything
        raise EstimateError(f"{name} cannot run on {sizes} without values: {in_a_line(error)}") from error
    return Imagined(name, module, made, f"traced on {sizes}")
