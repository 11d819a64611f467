"""What a round costs beside its pass: torch calls, waits for the device, thread time a sequence, by mode and load.

    python -m benchmarks.round_cost
    python -m benchmarks.round_cost --mode sampled --load 8 --load 32 --vocabulary 49152

A tiny model of random weights through plain torch operations, as on a GPU; on one thread of a CPU, so that a call costs
what the host pays for it. Outside the pass is what is left of a step without `LanguageModel.read`: proposing,
verification, texts, counts; no text is scored for another drafter (`engine.scoring`). A call is an operation that torch
dispatches; a wait is one whose result the host reads, so that it waits for a GPU. Both are counted in a round of their
own. Times are medians over rounds, then over repeats.
Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from alphaloop.engine import Sampling
from alphaloop.messages import Origin, parse_job
from alphaloop.settings.models import LookupDrafterSettings, ModelSettings, TargetSettings
from benchmarks.jobs import forced
from benchmarks.reporting import console, machine, parser_of, table_of
from engine.network import fused
from engine.network.operations import TorchOperations
from engine.own import TransformersEngine, load_engine

#: Sampling and most tokens that look-up drafts, by mode.
MODES: Final[Mapping[str, tuple[dict[str, Any], int]]] = {
    "greedy": ({"temperature": 0.0}, 0),
    "lookup": ({"temperature": 0.0}, 4),
    "sampled": ({"temperature": 0.8, "top_p": 0.95}, 0),
    "sampled_lookup": ({"temperature": 0.8, "top_p": 0.95}, 4),
    "whole_vocabulary": ({"temperature": 0.8}, 0),
    "top_k": ({"temperature": 0.8, "top_k": 50}, 0),
    "seeded": ({"temperature": 0.8, "top_p": 0.95, "seed": 1}, 0),
    "seeded_lookup": ({"temperature": 0.8, "top_p": 0.95, "seed": 1}, 4),
    "logprobs": ({"temperature": 0.8, "top_p": 0.95, "num_logprobs": 5}, 0),
}
NUM_WARM_UP: Final = 8
WORDS: Final = "the theory of the other thing def add(a, b): return a = b + c "
#: Operations whose results the host reads: numbers, and shapes that depend on values.
_WAITING: Final = frozenset({"item", "is_nonzero", "_local_scalar_dense", "nonzero", "nonzero_numpy", "bincount"})


@dataclass(frozen=True, slots=True)
class RoundCost:
    """A round outside its pass."""

    mode: str
    load: int  #: sequences
    num_calls: int
    num_waits: int
    us_a_sequence: float
    tokens_a_sequence: float


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations and waits while it is not paused."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_calls = self.num_waits = 0
        self.is_paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        is_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if not self.is_paused:
            self.num_calls += 1
            self.num_waits += name in _WAITING or is_mask
        return func(*args, **(kwargs or {}))


class ListReads(TorchFunctionMode):
    """Counts, as waits of `counter`, tensors that become lists or arrays: torch dispatches nothing for these."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.tolist, Tensor.numpy) and not self._counter.is_paused:
            self._counter.num_waits += 1
        return func(*args, **(kwargs or {}))


def main() -> None:
    """Measure each mode at each load, print the table, and the JSON line."""
    options = _options()
    torch.set_num_threads(1)
    costs: list[RoundCost] = []
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(fused, "operations_for", _plain):
        engine = _engine(Path(folder), options.vocabulary, max(options.load))
        for mode in options.mode:
            costs += [_cost(engine, mode, load, options) for load in options.load]
    table = table_of("A round beside its pass", "mode, sequences", "calls", "waits", "µs a sequence", "tokens")
    for cost in costs:
        figures = (cost.num_calls, cost.num_waits, f"{cost.us_a_sequence:.1f}", f"{cost.tokens_a_sequence:.2f}")
        table.add_row(f"{cost.mode}, {cost.load}", *map(str, figures))
    console.print(table)
    conditions = machine() | {"torch": torch.__version__, "vocabulary": options.vocabulary}
    print(json.dumps({"conditions": conditions, "rounds": [asdict(cost) for cost in costs]}))


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--mode", action="append", choices=MODES, help="all, unless some are named")
    parser.add_argument("--load", action="append", type=int, help="sequences that run; 8 and 32 unless named")
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    options.mode, options.load = options.mode or list(MODES), options.load or [8, 32]
    return options


def _plain(weight: Tensor, *, is_twice: bool = False) -> TorchOperations:
    return TorchOperations()


def _engine(folder: Path, vocabulary: int, num_slots: int) -> TransformersEngine:
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<eos>", *alphabet, *(f"<{number}>" for number in range(vocabulary - len(alphabet) - 1))]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)  # type: ignore[no-untyped-call]
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    target = TargetSettings(name="tiny", source=str(folder), dtype="float32", device="cpu")
    lookup = LookupDrafterSettings(shadow_share=0)  # what scores texts between rounds has a limit of its own
    return load_engine(ModelSettings(target=target, drafters={"lookup": lookup}), num_slots=num_slots)


def _cost(engine: TransformersEngine, mode: str, load: int, options: argparse.Namespace) -> RoundCost:
    repeats = [_repeat(engine, mode, load, options.rounds) for _ in range(options.repeats)]
    counter = _counted(engine, mode, load)
    return RoundCost(
        mode,
        load,
        counter.num_calls,
        counter.num_waits,
        statistics.median(us for us, _ in repeats),
        statistics.median(tokens for _, tokens in repeats),
    )


def _repeat(engine: TransformersEngine, mode: str, load: int, num_rounds: int) -> tuple[float, float]:
    """Median µs outside the pass, and tokens, a sequence and round."""
    _admit(engine, mode, load, num_rounds)
    times: list[float] = []
    num_tokens: list[int] = []
    pass_s = 0.0
    model, read = engine._target.model, engine._target.model.read

    def timed(*args: Any) -> Tensor:
        nonlocal pass_s
        began = time.thread_time()
        logits = read(*args)
        pass_s += time.thread_time() - began
        return logits

    with mock.patch.object(model, "read", timed):
        for _ in range(num_rounds):
            before, pass_s = time.thread_time(), 0.0
            step = engine.step()
            times.append(time.thread_time() - before - pass_s)
            num_tokens.append(sum(step.tokens_by_job.values()))
    engine.abandon()
    return 1e6 * statistics.median(times) / load, statistics.median(num_tokens) / load


def _counted(engine: TransformersEngine, mode: str, load: int) -> Counter:
    """One round's calls and waits."""
    _admit(engine, mode, load, 1)
    counter, model = Counter(), engine._target.model
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(model, "read", _uncounted(model.read, counter)))
        stack.enter_context(ListReads(counter))
        stack.enter_context(counter)
        engine.step()
    engine.abandon()
    return counter


def _uncounted(read: Callable[..., Tensor], counter: Counter) -> Callable[..., Tensor]:
    def paused(*args: Any) -> Tensor:
        counter.is_paused = True
        try:
            return read(*args)
        finally:
            counter.is_paused = False

    return paused


def _admit(engine: TransformersEngine, mode: str, load: int, num_rounds: int) -> None:
    """Admit `load` jobs and read their prompts, so that every next round has all of them."""
    settings, k = MODES[mode]
    sampling = Sampling(max_tokens=(NUM_WARM_UP + num_rounds + 4) * (k + 1), ignore_eos=True, **settings)
    for number in range(load):
        prompt = (WORDS * 3)[: 100 + number % 17]
        line = json.dumps({"task": "code", "body": {"prompt": prompt}}).encode()
        job = parse_job(line, Origin("benchmark", "jobs.code", 0, number), task="code")
        decision = forced("lookup", k, revision="benchmark") if k else forced()
        engine.admit(engine.prepare(job, sampling), decision)
    num_warm = 0
    while num_warm < NUM_WARM_UP:
        num_warm += not engine.step().num_prefill_tokens


if __name__ == "__main__":
    main()
