"""Compares the memory that `lightning-zero estimate` predicts with that of fits of many models, by all strategies.

    python -m benchmarks.estimates

Every case is a fit by the Trainer with AdamW, on small models of every kind. The prediction is the plan with traced
activations, made before anything is allocated. The following is measured for each rank:

- held: bytes of all tensors that are alive after the second step and were not before the model was made, without
  memory for tiles in transit;
- host: the bytes among them that would not be on a GPU, according to the engine;
- passing: host memory for tiles in transit from and to a disk; the plan gives an upper bound, since the amount depends
  on the disk's speed;
- disk: blocks of the files with state, according to the file system;
- growth: the peak of resident memory in the third step (VmHWM, reset before it) minus the resident memory before it.

The goals: held, host and disk within 1%, growth within 10%, and not more passing than planned. Allocations of 32 KiB
and more get mappings of their own (MALLOC_MMAP_THRESHOLD_), so that freed memory leaves the resident memory in the same
way in each run.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.environment import describe, free_port
from benchmarks.examples import ROOT

WORDS, TOKENS, BATCH = 4096, 64, 4
GOALS = {"held": 0.01, "host": 0.01, "passing": 0.0, "disk": 0.01, "growth": 0.10}
PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed"}
NVME = {"nvme_buffer_gb": 0.002}
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "32768",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_ARENA_MAX": "1",
    "MKL_DISABLE_FAST_MM": "1",
    "OMP_NUM_THREADS": "1",
}
_START = "import sys; sys.path.append({root!r}); from benchmarks.estimates import work; work()"


# -- models -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of model: a function that makes it, and one that makes a batch by the names of forward's arguments."""

    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]


class Lstm(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.lstm = nn.LSTM(width, 2 * width, num_layers=2, batch_first=True)
        self.head = nn.Linear(2 * width, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.head(self.lstm(self.embed(input_ids))[0])
        return {"loss": F.cross_entropy(scores.float().flatten(0, 1), labels.flatten())}


class Experts(nn.Module):
    """A layer of experts, each of which processes the tokens with the largest weights for it (expert choice)."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights = self.gate(flat).softmax(-1)
        capacity = 2 * len(flat) // len(self.experts)
        result = flat
        for number, expert in enumerate(self.experts):
            share, chosen = weights[:, number].topk(capacity)
            result = result.index_add(0, chosen, (expert(flat[chosen]) * share[:, None]).to(result.dtype))
        return result.view_as(x)


class Moe(nn.Module):
    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Experts(width, 4) for _ in range(4))
        self.head = nn.Linear(width, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.embed(input_ids)
        for layer in self.layers:
            h = layer(h)
        return {"loss": F.cross_entropy(self.head(h).float().flatten(0, 1), labels.flatten())}


def words() -> dict[str, Tensor]:
    ids = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) % WORDS
    return {"input_ids": ids, "labels": ids}


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.ones(4 * BATCH, 3, 64, 64), "labels": torch.zeros(4 * BATCH, dtype=torch.long)}


def of_transformers(name: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        made: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**sizes))
        return made

    return make


def gpt2(layers: int, width: int, recompute: bool = False) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        sizes = {"n_layer": layers, "n_embd": width, "n_head": 4, "n_positions": TOKENS, "use_cache": False}
        dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        made: Any = of_transformers("GPT2LMHeadModel", "GPT2Config", vocab_size=WORDS, **sizes, **dropout)()
        if recompute:
            made.gradient_checkpointing_enable({"use_reentrant": False})
        return made

    return make


def lora() -> nn.Module:
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(gpt2(4, 384)(), peft.LoraConfig(r=16, target_modules=["c_attn", "c_fc"]))


_BERT = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
MODELS: dict[str, Kind] = {
    "gpt2, 4 x 256": Kind(gpt2(4, 256), words),
    "gpt2, 2 x 512": Kind(gpt2(2, 512), words),
    "gpt2, 12 x 192": Kind(gpt2(12, 192), words),
    "gpt2, 6 x 256, recomputed": Kind(gpt2(6, 256, recompute=True), words),
    "t5": Kind(
        of_transformers(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=WORDS,
            d_model=256,
            d_kv=64,
            d_ff=1024,
            num_layers=3,
            num_heads=4,
            decoder_start_token_id=0,
            use_cache=False,
        ),
        words,
    ),
    "vit": Kind(
        of_transformers("ViTForImageClassification", "ViTConfig", image_size=64, patch_size=8, **_BERT), images
    ),
    "bert": Kind(
        of_transformers("BertForMaskedLM", "BertConfig", vocab_size=WORDS, max_position_embeddings=TOKENS, **_BERT),
        words,
    ),
    "llama": Kind(
        of_transformers(
            "LlamaForCausalLM",
            "LlamaConfig",
            vocab_size=WORDS,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        ),
        words,
    ),
    "lstm": Kind(Lstm, words),
    "mixture of experts": Kind(Moe, words),
    "lora": Kind(lora, words),
}


# -- one rank ---------------------------------------------------------------------------------------------------------


def work() -> None:
    """Runs a list of cases in this rank, and prints a line of JSON for each."""
    import logging

    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    cases = json.loads(sys.argv[1])
    with Path(sys.argv[2]).open("w") as out:
        for case in cases:
            found = measure(**case)
            out.write(json.dumps(case | found) + "\n")
            print(case, found, file=sys.stderr, flush=True)


def measure(model: str, name: str, precision: str, ranks: int) -> dict[str, Any]:
    """This rank's planned and measured bytes: held in total, on the host and on a disk, and the growth of a step."""
    kind, flag = MODELS[model], PRECISIONS[precision]
    planned = amounts(plan_of(model, name, flag, ranks))
    gc.collect()
    gc.freeze()  # later collections ignore the objects that exist now
    with tempfile.TemporaryDirectory() as folder:
        found = fit(kind, name, flag, ranks, folder)
    gc.unfreeze()
    gc.collect()
    return found | planned


def amounts(planned: Any) -> dict[str, int]:
    """The planned amounts that correspond to the measured ones."""
    held, passing = planned.held, planned.staging.host
    values = {
        "held": held.total - passing,
        "host": held.host - passing,
        "passing": passing,
        "disk": held.disk,
        "growth": planned.peak.total - held.total,
    }
    return {f"{name}_planned": value for name, value in values.items()}


def strategy_options(name: str, folder: str) -> dict[str, Any]:
    from lightning_zero.integration.names import STRATEGIES

    arguments = dict(STRATEGIES[name])
    return arguments | {"nvme_path": folder, **NVME} if "nvme" in name else arguments


@functools.cache
def traced(model: str, flag: Any) -> tuple[Any, Any]:
    """A model on the meta device, and the trace of its activations."""
    from lightning_zero.integration.precision import ZeroPrecision
    from lightning_zero.planning.tracing import trace

    kind, plugin = MODELS[model], ZeroPrecision(flag)
    with torch.device("meta"):
        module = module_of(kind)

    def loss(twin: nn.Module) -> Tensor:
        with plugin.computing_on("cpu"):
            return twin.training_step(kind.batch())  # type: ignore[operator, no-any-return]

    return module, trace(module, loss, plugin.policy)


def plan_of(model: str, name: str, flag: Any, ranks: int) -> Any:
    """The plan that `estimate` makes, for CPU ranks."""
    from lightning_zero.integration import engines
    from lightning_zero.integration.options import StrategyOptions
    from lightning_zero.integration.precision import ZeroPrecision
    from lightning_zero.integration.remedies import setting_of
    from lightning_zero.planning.memory import Memory

    module, activations = traced(model, flag)
    options = StrategyOptions(**strategy_options(name, "/"))
    policy = ZeroPrecision(flag).policy
    memory = Memory(
        module=module,
        trains=True,
        optimizers=[module.configure_optimizers()],
        micro_batches=1,
        setting=setting_of(options, engines.shard_size(options, 1, ranks), policy),
        dtypes={},
        units=None,
        native="auto",
        device=torch.device("cpu"),
        world_size=ranks,
        rank=int(os.environ["RANK"]),
        candidates=[],
        hint="",
        trace=activations,
    )
    return memory.plan


def module_of(kind: Kind) -> Any:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = kind.make()

        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            output: Any = self.model(**batch)
            loss: Tensor = output["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad])

    return Module()


def fit(kind: Kind, name: str, flag: Any, ranks: int, folder: str) -> dict[str, int]:
    """Train three steps; returns the bytes held after the second one, and the growth in the third."""
    import lightning as L

    import lightning_zero
    from lightning_zero.engine import engines_of
    from lightning_zero.planning.memory import held_by

    found: dict[str, int] = {}

    class Look(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
            if number == 2:
                gc.collect()
                found["held"] = sum(s.nbytes() for s in storages())
                found["held"] -= sum(t.untyped_storage().nbytes() for t in {id(t): t for t in batch.values()}.values())
                (engine,) = engines_of(module)
                parts = held_by(engine)
                found["passing"] = parts["staging"].host
                found["held"] -= found["passing"]
                found["host"] = sum(part.host for part in parts.values()) - found["passing"]
                found["disk"] = sum(file.stat().st_blocks * 512 for file in Path(folder).rglob("*.bin"))
                Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
                found["resident"] = resident("VmRSS")

        def on_train_batch_end(self, trainer: Any, module: Any, output: Any, batch: Any, number: int) -> None:
            if number == 2:
                found["growth"] = resident("VmHWM") - found["resident"]

    trainer = L.Trainer(
        strategy=lightning_zero.ZeroStrategy(**strategy_options(name, folder)),
        precision=flag,
        accelerator="cpu",
        devices=ranks,
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Look()],
    )
    torch.manual_seed(0)
    trainer.fit(module_of(kind), torch.utils.data.DataLoader([kind.batch()] * (3 * ranks), batch_size=None))
    return found


def resident(line: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{line}:\s+(\d+) kB", status, re.MULTILINE)[1]) * 1024  # type: ignore[index]


def storages() -> list[torch.UntypedStorage]:
    """The storages of all tensors that are alive, each once."""
    tensors = [o for o in gc.get_objects() if isinstance(o, Tensor)]
    with torch._C.DisableTorchFunctionSubclass():
        found = [t.untyped_storage() for t in tensors if t.layout is torch.strided and t.device.type == "cpu"]
    return list({s.data_ptr(): s for s in found if s.nbytes()}.values())


# -- all cases --------------------------------------------------------------------------------------------------------


def cases(models: list[str], names: list[str], precisions: list[str], ranks: int) -> Iterator[dict[str, Any]]:
    for model, precision, name in itertools.product(models, precisions, names):
        yield {"model": model, "name": name, "precision": precision, "ranks": ranks}


def run_ranks(wanted: list[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """Runs cases in ``ranks`` processes, and returns the rows of all ranks."""
    port = str(free_port())
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"{rank}" for rank in range(ranks)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-P", "-c", _START.format(root=str(ROOT)), json.dumps(wanted), str(out)],
                env=os.environ | ENVIRONMENT | environment_of(rank, ranks, port),
                cwd=folder,
            )
            for rank, out in enumerate(outs)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")
        return [
            json.loads(line) | {"rank": rank} for rank, out in enumerate(outs) for line in out.read_text().splitlines()
        ]


def environment_of(rank: int, ranks: int, port: str) -> dict[str, str]:
    """The environment variables that torchrun sets."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    named = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
    return {name: str(value) for name, value in values.items()} | named


def replanned(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose planned amounts are computed again by the current version."""
    os.environ["RANK"] = str(row["rank"])
    plan = plan_of(row["model"], row["name"], PRECISIONS[row["precision"]], row["ranks"])
    return row | amounts(plan)


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds the ratios of measured to planned amounts, for amounts whose plan is not 0."""
    return [
        row | {f"{name}_ratio": row[name] / row[f"{name}_planned"] for name in GOALS if row[f"{name}_planned"]}
        for row in rows
    ]


def deviation(name: str, ratio: float) -> float:
    """The deviation of a plan; memory in passing below the plan does not count."""
    return max(ratio - 1, 0.0) if name == "passing" else abs(ratio - 1)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest deviations by model and by name, and how many cases are within the goals."""
    found: dict[str, Any] = {"cases": len(rows)}
    for name, goal in GOALS.items():
        mine = [row for row in rows if f"{name}_ratio" in row]
        within = sum(deviation(name, row[f"{name}_ratio"]) <= goal for row in mine)
        found |= {f"{name}_cases": len(mine), f"{name}_within_goal": within}
    for by in ("model", "name"):
        kinds = {key: [row for row in rows if row[by] == key] for key in dict.fromkeys(row[by] for row in rows)}
        found[f"{by}s"] = {key: {"cases": len(mine)} | deviations(mine) for key, mine in kinds.items()}
    return found


def deviations(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {
        f"{name}_off": max((deviation(name, row.get(f"{name}_ratio", 1.0)) for row in rows), default=0.0)
        for name in GOALS
    }


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("model", "name", "precision", "ranks", "rank"))


def main() -> None:
    from lightning_zero.integration.names import STRATEGIES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--names", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/estimates.json")
    parser.add_argument("--add", action="store_true", help="keep those results of --out that are not measured now")
    parser.add_argument("--measured", type=Path, help="plan again for what a file of results measured, and run nothing")
    options = parser.parse_args()

    if options.measured:
        result = json.loads(options.measured.read_text())
        rows = ratios([replanned(row) for row in result["rows"]])
        again = {"planned_again": describe()["date"], "command_of_plans": describe()["command"]}
        options.out.write_text(json.dumps(result | again | summary(rows) | {"rows": rows}, indent=1) + "\n")
        print(json.dumps(summary(rows), indent=2))
        return
    before = json.loads(options.out.read_text()) if options.add else {"runs": [], "rows": []}
    rows = {key_of(row): row for row in before["rows"]}
    start = time.monotonic()
    for ranks, model in itertools.product(options.ranks, options.models):
        wanted = list(cases([model], options.names, options.precisions, ranks))
        rows |= {key_of(row): row for row in ratios(run_ranks(wanted, ranks))}
        run = describe() | {"seconds": round(time.monotonic() - start), "environment": ENVIRONMENT}
        found = list(rows.values())
        result = {"runs": [*before["runs"], run], **summary(found), "rows": found}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    for key, row in rows.items():
        print(*(f"{row.get(f'{name}_ratio', 1):.3f}" for name in GOALS), *key, sep="  ")
    print(json.dumps(summary(found), indent=2))


if __name__ == "__main__":
    main()
