"""From module trees to units and buckets."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any, Self

import pytest
import torch
from engine import driver
from engine.driver import Setup
from helpers import models
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_zero.sharding import Mesh, MixedPrecisionPolicy, ShardingPolicy, find_units
from lightning_zero.sharding.partition import (
    MAX_IMBALANCE,
    ROOT,
    BucketSpec,
    is_norm,
    layout_of,
    make_buckets,
    partition,
)

KEEP = MixedPrecisionPolicy()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
LARGE = 1 << 30


class Composite(nn.Module):
    """A block: a module with children."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)


class OtherBlock(Composite):
    pass


class Nested(nn.Module):
    """A block of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Composite() for _ in range(2))


class Experts(nn.Module):
    """A mixture of experts without repeated blocks around it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(3, 2)
        self.experts = nn.ModuleList(Composite() for _ in range(2))


class Tree(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def unit_names(root: nn.Module, patterns: Sequence[str | type[nn.Module]] | None = None) -> list[str]:
    units = find_units(root, patterns)
    assert all(root.get_submodule(unit.name) is unit.module for unit in units)
    return [unit.name for unit in units]


def test_repeated_blocks_are_units() -> None:
    assert unit_names(models.TinyTransformer(depth=3)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_model_without_repeated_blocks_has_no_units() -> None:
    assert unit_names(models.make_model("mlp")) == []
    assert unit_names(Tree(only=nn.ModuleList([Composite()]))) == []


def test_every_container_is_looked_into() -> None:
    first, second = Composite(), Composite()
    assert unit_names(Tree(body=nn.ModuleList([first, second]))) == ["body.0", "body.1"]
    assert unit_names(Tree(body=nn.Sequential(first, second))) == ["body.0", "body.1"]
    assert unit_names(Tree(body=nn.ModuleDict({"x": first, "y": second}))) == ["body.x", "body.y"]


def test_a_block_may_begin_with_an_empty_container() -> None:
    assert unit_names(nn.ModuleList(Tree(adapters=nn.ModuleDict(), body=Composite()) for _ in range(2))) == ["0", "1"]


def test_a_sequential_root_is_a_container_of_blocks() -> None:
    assert unit_names(nn.Sequential(nn.Linear(3, 3), Composite(), Composite())) == ["1", "2"]


def test_only_the_outermost_blocks_are_units() -> None:
    assert unit_names(Tree(stages=nn.ModuleList([Nested(), Nested()]))) == ["stages.0", "stages.1"]
    assert unit_names(Tree(one=Nested())) == ["one.layers.0", "one.layers.1"]


def test_single_layers_are_no_blocks() -> None:
    assert unit_names(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))) == []
    assert unit_names(Tree(acts=nn.ModuleList([nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())]))) == []


def test_blocks_of_different_classes_are_counted_apart() -> None:
    assert unit_names(nn.Sequential(Composite(), OtherBlock(), Composite())) == ["0", "2"]


def test_experts_are_never_units() -> None:
    assert unit_names(Tree(moe=Experts())) == ["moe"]
    assert unit_names(Tree(layers=nn.ModuleList([Experts(), Experts()]))) == ["layers.0", "layers.1"]
    assert unit_names(Experts()) == []
    # A stack of blocks whose only experts lie deeper.
    deep = Tree(layers=nn.ModuleList([Tree(mlp=Experts()), Tree(mlp=Experts())]))
    assert unit_names(deep) == ["layers.0", "layers.1"]


@pytest.mark.parametrize("pattern", [Composite, "Composite", "one.layers.*"])
def test_units_can_be_chosen(pattern: str | type[nn.Module]) -> None:
    assert unit_names(Tree(one=Nested(), two=nn.Linear(3, 3)), [pattern]) == ["one.layers.0", "one.layers.1"]


def test_chosen_units_do_not_nest() -> None:
    tree = Tree(one=Nested(), ones=Composite())
    assert unit_names(tree, ["one", "one.layers.0"]) == ["one"]
    assert unit_names(tree, ["one", "Composite"]) == ["one", "ones"]
    assert unit_names(tree, ["ones.inner", "Nested"]) == ["one", "ones.inner"]


def test_an_empty_choice_makes_everything_the_roots() -> None:
    assert unit_names(models.make_model("transformer"), []) == []


def test_a_choice_that_matches_nothing_names_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"units=\['Blocks'\] match no module of TinyTransformer") as caught:
        find_units(models.make_model("transformer"), ["Block", "Blocks"])
    assert all(name in str(caught.value) for name in ("Block", "Embedding", "LayerNorm", "Linear", "'transformer.h.*'"))
    with pytest.raises(ValueError, match="match no module"):
        find_units(nn.Sequential(nn.ReLU()), ["ReLU"])


def buckets_of(
    root: nn.Module,
    stage: int = 3,
    precision: MixedPrecisionPolicy = KEEP,
    *,
    size: int = LARGE,
    optimized: Sequence[nn.Parameter] | None = None,
    whole: Collection[int] = (),
) -> list[BucketSpec]:
    chosen = root.parameters() if optimized is None else optimized
    sharding = ShardingPolicy.from_stage(stage)
    return make_buckets(root, find_units(root), {id(p) for p in chosen}, sharding, precision, size, whole=whole)


@pytest.mark.parametrize("stage", [1, 3])
def test_whole_parameters_have_buckets_of_their_own(stage: int) -> None:
    model = models.make_model("transformer")
    matrices = {id(p) for p in model.parameters() if p.dim() == 2}
    buckets = buckets_of(model, stage, whole=matrices)
    assert {bucket.whole for bucket in buckets} == {True, False}
    for bucket in buckets:
        assert all((id(spec.parameter) in matrices) == bucket.whole for spec in bucket.specs)
    assert sum(len(bucket.specs) for bucket in buckets) == len(list(model.parameters()))


def test_parameters_that_no_optimizer_has_lie_whole_where_they_may_join_one_that_needs_it() -> None:
    model = models.make_model("transformer")
    placement = driver.make_placement(Setup(2), Mesh.imagined(2))
    first, *others = model.blocks[0].parameters()
    buckets = partition(model, placement, [first], None, 25.0, 0, whole=[first]).buckets
    assert all(bucket.whole for bucket in buckets)
    buckets = partition(model, placement, [first, *others], None, 25.0, 0, whole=[first]).buckets
    assert {spec.name for b in buckets for spec in b.specs if not b.whole} == {
        name for name, p in model.named_parameters() if p is not first and name.startswith("blocks.0.")
    }


def test_units_share_buckets_until_whole_parameters_are_balanced() -> None:
    """Each block has one large matrix: over four ranks, four of them fit, whatever the size of a bucket."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(40, 40), nn.Tanh()) for _ in range(8)))
    placement = driver.make_placement(Setup(2), Mesh.imagined(4))
    buckets = partition(model, placement, model.parameters(), None, 1e-3, 0, whole=model.parameters()).buckets
    assert [len(bucket.units) for bucket in buckets] == [4, 4]
    assert all(layout_of(bucket, placement).imbalance <= MAX_IMBALANCE for bucket in buckets)


def names_of(bucket: BucketSpec) -> list[str]:
    return [spec.name for spec in bucket.specs]


def test_parameters_sharded_by_unit_share_no_bucket() -> None:
    buckets = buckets_of(models.TinyTransformer(depth=3), 3)
    assert [bucket.units for bucket in buckets] == [[ROOT], ["blocks.0"], ["blocks.1"], ["blocks.2"]]
    assert names_of(buckets[0]) == ["tokens.weight", "positions.weight", "norm.weight", "norm.bias"]
    assert all(name.startswith("blocks.0.") for name in names_of(buckets[1]))


def test_whole_parameters_fill_buckets_in_forward_order() -> None:
    root = models.TinyTransformer(depth=3)
    (packed,) = buckets_of(root, 2)
    assert packed.units == [ROOT, "blocks.0", "blocks.1", "blocks.2"]
    block = sum(p.numel() for p in root.blocks[0].parameters()) * 4
    # A unit is not split: a bucket is closed to further units once it has the size.
    pairs = buckets_of(root, 2, size=block + 1)
    assert [bucket.units for bucket in pairs] == [[ROOT, "blocks.0"], ["blocks.1", "blocks.2"]]
    assert [len(bucket.units) for bucket in buckets_of(root, 2, size=1)] == [1, 1, 1, 1]


def test_a_parameter_that_units_share_is_the_roots() -> None:
    root = models.TinyTransformer(depth=3)
    root.blocks[2].up.weight = root.blocks[0].up.weight
    names = [names_of(bucket) for bucket in buckets_of(root)]
    assert "blocks.0.up.weight" in names[0]
    assert "blocks.0.up.weight" not in names[1]
    assert "blocks.1.up.weight" in names[2]


def test_a_parameter_tied_to_one_outside_units_is_the_roots() -> None:
    root = models.make_model("transformer")
    root.blocks[1].project.weight = nn.Parameter(torch.zeros(models.WIDTH, models.WIDTH))
    root.extra = nn.Linear(models.WIDTH, models.WIDTH, bias=False)
    root.extra.weight = root.blocks[1].project.weight
    assert "blocks.1.project.weight" in names_of(buckets_of(root)[0])


def test_a_parameter_tied_inside_one_unit_stays_there() -> None:
    root = Tree(blocks=nn.ModuleList([Nested(), Nested()]))
    first = root.blocks[0].layers
    first[1].inner.weight = first[0].inner.weight
    assert [bucket.units for bucket in buckets_of(root)] == [["blocks.0"], ["blocks.1"]]
    assert names_of(buckets_of(root)[0]).count("blocks.0.layers.0.inner.weight") == 1


@pytest.mark.parametrize("stage", [2, 3])
def test_dtypes_do_not_mix(stage: int) -> None:
    root = models.make_model("transformer")
    root.blocks[1].up.double()
    buckets = buckets_of(root, stage)
    assert all({spec.parameter.dtype for spec in bucket.specs} == {bucket.dtype} for bucket in buckets)
    doubles = [names_of(bucket) for bucket in buckets if bucket.dtype == torch.float64]
    assert doubles == [["blocks.1.up.weight", "blocks.1.up.bias"]]


@pytest.mark.parametrize("stage", [2, 3])
def test_what_no_optimizer_updates_has_buckets_of_its_own(stage: int) -> None:
    root = models.make_model("frozen")
    trained = [p for p in root.parameters() if p.requires_grad]
    buckets = buckets_of(root, stage, optimized=trained)
    chosen = {id(p) for p in trained}
    assert all({id(spec.parameter) in chosen for spec in bucket.specs} == {bucket.optimized} for bucket in buckets)
    assert {bucket.optimized for bucket in buckets} == {True, False}


def test_requires_grad_does_not_split() -> None:
    root = models.make_model("transformer")
    before = [names_of(bucket) for bucket in buckets_of(root)]
    root.blocks[1].up.weight.requires_grad_(False)
    assert [names_of(bucket) for bucket in buckets_of(root)] == before


class LlamaRMSNorm(nn.Module):
    """A normalization layer of a library's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    "layer",
    [
        nn.LayerNorm(3),
        nn.RMSNorm(3),
        nn.GroupNorm(1, 3),
        nn.BatchNorm2d(3),
        nn.InstanceNorm1d(3, affine=True),
        LlamaRMSNorm(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_norms_keep_their_dtype_in_mixed_precision(layer: nn.Module) -> None:
    assert is_norm(layer)
    root = Tree(linear=nn.Linear(3, 3), norm=layer)
    dtypes = {name: bucket.dtype for bucket in buckets_of(root, 2, BF16) for name in names_of(bucket)}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {n for n in dtypes if "norm" in n}
    assert dtypes["linear.weight"] == torch.bfloat16
    true = MixedPrecisionPolicy(param_dtype=torch.bfloat16, keep_norms=False)
    assert {bucket.dtype for bucket in buckets_of(root, 2, true)} == {torch.bfloat16}


def test_norms_of_another_16_bit_dtype_become_fp32() -> None:
    """They have no masters: an update would be rounded away, or divide by a square that is 0 in fp16."""
    for loaded, expected in ((torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        root = Tree(linear=nn.Linear(3, 3), norm=nn.LayerNorm(3)).to(loaded)
        dtypes = {name: bucket.dtype for bucket in buckets_of(root, 2, BF16) for name in names_of(bucket)}
        assert (dtypes["norm.weight"], dtypes["linear.weight"]) == (expected, torch.bfloat16)


def test_weight_normalization_is_no_norm_layer() -> None:
    assert not is_norm(nn.Linear(3, 3))
    assert not is_norm(nn.Sequential(OrderedDict(norm=nn.ReLU())))


def test_integers_and_codes_are_not_cast() -> None:
    root = Tree(linear=nn.Linear(3, 3))
    root.table = nn.Parameter(torch.arange(3), requires_grad=False)
    root.codes = nn.Parameter(torch.arange(3).to(torch.float8_e4m3fn), requires_grad=False)  # beside a scale
    trained = list(root.linear.parameters())
    dtypes = {name: b.dtype for b in buckets_of(root, 2, BF16, optimized=trained) for name in names_of(b)}
    assert (dtypes["table"], dtypes["codes"]) == (torch.int64, torch.float8_e4m3fn)


class Wrapped(Tensor):
    """A tensor around another one, as DTensor is."""

    def __new__(cls, inner: Tensor) -> Self:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: object) -> Wrapped:
        return Wrapped(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Callable[..., Tensor], types: object, args: Any = (), kwargs: Any = None) -> Any:
        return cls(func(*(arg.inner if isinstance(arg, cls) else arg for arg in args)))


UNSUPPORTED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "complex": (lambda: holding(torch.zeros(2, dtype=torch.complex64)), r"'weight' is torch\.complex64.*real, dense"),
    "sparse": (lambda: holding(torch.eye(2).to_sparse()), r"'weight' is torch\.float32 with layout torch\.sparse_coo"),
    "csr": (lambda: holding(torch.eye(2).to_sparse_csr()), r"'weight' is torch\.float32 with layout torch\.sparse_csr"),
    "quantized": (
        lambda: holding(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)),
        r"'weight' is torch\.qint8, quantized; .*`dequantize\(\)`",
    ),
    "nested": (lambda: holding(torch.nested.nested_tensor([torch.ones(2)])), r"'weight' is torch\.float32, nested;"),
    "wrapper": (lambda: holding(Wrapped(torch.ones(2))), r"'weight' is torch\.float32, Wrapped;"),
    "script": (lambda: Tree(net=torch.jit.script(nn.Linear(2, 2))), r"'net' is a script of torch\.jit.*no hooks"),
    "loaded": (lambda: Tree(net=loaded(nn.Linear(2, 2))), r"'net' is a script of .*`self\.frozen = \[script\]`"),
    "embedding": (lambda: Tree(table=nn.Embedding(3, 2, sparse=True)), r"'table' is Embedding\(3, 2, sparse=True\)"),
    "bag": (lambda: Tree(bag=nn.EmbeddingBag(3, 2, sparse=True)), r"'bag' is EmbeddingBag\(3, 2.*: sparse gradients"),
}


def loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(module), file)
    return torch.jit.load(io.BytesIO(file.getvalue()))


def holding(weight: Tensor) -> nn.Module:
    root = nn.Module()
    root.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point() or weight.is_complex())
    return root


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*deprecat", "ignore:Sparse CSR")
@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_what_is_refused_is_left_as_it_was(kind: str) -> None:
    make, message = UNSUPPORTED[kind]
    root = Tree(first=nn.BatchNorm1d(3), odd=make())
    before = {name: (value, value.requires_grad) for name, value in root.state_dict(keep_vars=True).items()}
    place = root.first.weight.data_ptr()
    with pytest.raises(TypeError, match=message.replace("'", "'odd.", 1)):
        driver.make_engine(root, Setup(3), Mesh.single())
    after = root.state_dict(keep_vars=True)
    assert before.keys() == after.keys()
    assert all(after[k] is value and value.requires_grad == needed for k, (value, needed) in before.items())
    assert root.first.weight.data_ptr() == place
    for module in root.modules():
        assert "zero_grad" not in vars(module)
        assert not module._forward_pre_hooks


@pytest.mark.filterwarnings("ignore:.*deprecat")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_script_without_parameters_may_be_in_the_module(stage: int) -> None:
    root = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.BatchNorm1d(3, affine=False)))
    engine = driver.make_engine(root, Setup(stage), Mesh.single())
    with engine.forward_context():
        loss = root(torch.randn(4, 3)).square().sum()
    driver.backward(engine, loss)
    assert engine.gradients_of(engine.buckets[0]).received == [True, True]


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_parameters_are_refused() -> None:
    with pytest.raises(TypeError, match=r"'0\.weight' is a UninitializedParameter, which has no shape yet"):
        buckets_of(nn.Sequential(nn.LazyLinear(3)))


@st.composite
def trees(draw: st.DrawFn) -> nn.Module:
    """Module trees of any shape, with parameters of any shape and dtype, tied to each other at random."""
    shapes = st.lists(st.integers(0, 4), max_size=3)
    dtypes = st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.int64])
    made: list[nn.Parameter] = []

    def parameter() -> nn.Parameter:
        if made and draw(st.integers(0, 4)) == 0:
            return draw(st.sampled_from(made))
        value = torch.zeros(draw(shapes), dtype=draw(dtypes))
        made.append(nn.Parameter(value, requires_grad=value.is_floating_point() and draw(st.booleans())))
        return made[-1]

    def module(depth: int) -> nn.Module:
        node = draw(st.sampled_from([nn.Module, Composite, OtherBlock, Experts, nn.ModuleList, nn.LayerNorm]))
        node = node(2) if node is nn.LayerNorm else node()
        for index in range(draw(st.integers(0, 2))):
            node.register_parameter(f"p{index}", parameter())
        for index in range(draw(st.integers(0, 3)) if depth else 0):
            node.add_module(str(index), module(depth - 1))
        return node

    return module(3)


@settings(max_examples=50)
@given(trees())
def test_units_of_any_tree_are_disjoint_and_in_order(root: nn.Module) -> None:
    units = find_units(root)
    names = [unit.name for unit in units]
    order = {name: number for number, (name, _) in enumerate(root.named_modules(remove_duplicate=False))}
    assert [order[name] for name in names] == sorted({order[name] for name in names})
    assert all(root.get_submodule(unit.name) is unit.module and unit.module is not root for unit in units)
    assert not any(a != b and b.startswith(f"{a}.") for a in names for b in names)
    assert not any("experts." in name for name in names)


@settings(max_examples=50)
@given(trees(), st.sampled_from([0, 2, 3]), st.sampled_from([1, 64, LARGE]), st.sampled_from([KEEP, BF16]), st.data())
def test_buckets_of_any_tree(
    root: nn.Module, stage: int, size: int, precision: MixedPrecisionPolicy, data: st.DataObject
) -> None:
    named = dict(root.named_parameters())
    chosen = [p for p in named.values() if p.is_floating_point() and data.draw(st.booleans())]
    buckets = buckets_of(root, stage, precision, size=size, optimized=chosen)
    found = [spec for bucket in buckets for spec in bucket.specs]
    # Every parameter once, tied or not, under its first name.
    assert len(found) == len(named)
    assert {spec.name: id(spec.parameter) for spec in found} == {name: id(p) for name, p in named.items()}
    position = {name: number for number, name in enumerate(named)}
    homes = {unit.name: set(map(id, unit.module.parameters())) for unit in find_units(root)}
    outside = [m for m in root.modules() if not any(m in unit.module.modules() for unit in find_units(root))]
    roots = {id(p) for m in outside for p in m.parameters(recurse=False)}
    for bucket in buckets:
        ids = {id(p) for p in chosen}
        assert {(spec.parameter.dtype, id(spec.parameter) in ids) for spec in bucket.specs} == {
            (bucket.specs[0].parameter.dtype, bucket.optimized)
        }
        assert bucket.nbytes == sum(spec.parameter.numel() for spec in bucket.specs) * bucket.dtype.itemsize
        assert stage < 3 or len(bucket.units) == 1
        per_unit: list[list[str]] = []
        for spec in bucket.specs:
            holders = [unit for unit, ids in homes.items() if id(spec.parameter) in ids]
            shared = len(holders) != 1 or id(spec.parameter) in roots
            home = ROOT if shared else holders[0]
            assert home in bucket.units
            if not per_unit or per_unit[-1][0] != home:
                per_unit.append([home])
            per_unit[-1].append(spec.name)
        assert [unit for unit, *_ in per_unit] == bucket.units
        # Without its last unit it was still open.
        before = sum(named[name].numel() for _, *names in per_unit[:-1] for name in names) * bucket.dtype.itemsize
        assert len(per_unit) == 1 or before < size
        for _, *names in per_unit:
            assert [position[name] for name in names] == sorted(position[name] for name in names)
