"""EAGLE-3 heads of a target, trained as they will draft: on the target's states first, then on their own.

A pass over a text with the target's states at every position is the first step. In step j the state at a position is
the one that step j - 1 gave for the position before, as in a draft of j tokens; its queries see the target's states up
to j - 1 positions before, and behind them the keys of the steps between ("training-time test", Li et al. 2025, arXiv
2503.01840). So each step costs a pass, and every position is the beginning of a draft.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter, functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.draft_card import MeasuredDraft
from engine.text_facts import text_config
from engine.training.data import write_tensors
from engine.training.distil import columns_of, measured_draft
from engine.training.heads import DECAY, walk_drafts
from engine.training.recipe import Recipe
from engine.training.recording import RecordedText

#: Of the weights at the beginning.
_SPREAD: Final = 0.02


@dataclass(frozen=True, slots=True, eq=False)
class Eagle3Lesson:
    """One text: pairs of a position's states and the token that follows, and the final states of the answer."""

    task: str
    states: Tensor  #: [pairs, taps * hidden], bfloat16
    token_ids: Tensor  #: [pairs + 1]: token i follows state i; the last follows no pair
    final: Tensor  #: [answered, hidden], bfloat16: the final states from pair `num_before` on
    num_before: int  #: pairs before that of the first final state

    @staticmethod
    def of(recorded: RecordedText) -> Eagle3Lesson | None:
        """Of what was recorded of a text; None where that is too little."""
        if recorded.layers is None:
            return None
        tokens = recorded.text.token_ids[recorded.first + 1 :]
        num = min(len(recorded.layers), len(tokens) - 1)
        if num < 2:
            return None
        before = recorded.final_first - recorded.first
        token_ids = torch.tensor(tokens[: num + 1])
        return Eagle3Lesson(recorded.text.task, recorded.layers[:num], token_ids, recorded.final, before)

    def __len__(self) -> int:
        return len(self.states)


class Eagle3Training(torch.nn.Module):
    """`engine.drafters.eagle3.Eagle3Network`, to be trained on texts one by one."""

    def __init__(
        self,
        config: LlamaConfig,
        embeddings: Tensor,
        head: Tensor,
        norm: Tensor,
        token_ids: Tensor | None,
        *,
        num_taps: int,
        seed: int,
    ) -> None:
        """The target's `embeddings`, `head` [columns, hidden] and last `norm`; the first two stay as they are."""
        super().__init__()
        self.config, self.token_ids = config, token_ids
        self._columns = columns_of(token_ids, len(embeddings))
        hidden, inner = config.hidden_size, config.intermediate_size
        num_heads = config.num_attention_heads
        self._num_keys = config.num_key_value_heads or num_heads
        self._head_dim = config.head_dim or hidden // num_heads
        size, keys = num_heads * self._head_dim, self._num_keys * self._head_dim
        generator = torch.Generator().manual_seed(seed)

        def made(*shape: int) -> Parameter:
            return Parameter(_SPREAD * torch.randn(shape, generator=generator))

        self.fc = made(hidden, num_taps * hidden)
        self.query, self.key, self.value = made(size, 2 * hidden), made(keys, 2 * hidden), made(keys, 2 * hidden)
        self.out, self.gate, self.up = made(hidden, size), made(inner, hidden), made(inner, hidden)
        self.down = made(hidden, inner)
        self.input_norm, self.state_norm, self.mlp_norm = (Parameter(torch.ones(hidden)) for _ in range(3))
        self.norm = Parameter(norm.float().clone())
        self.embeddings, self.head = embeddings.float(), head.float()
        self.rotary = LlamaRotaryEmbedding(config)

    def steps(self, lesson: Eagle3Lesson, num: int) -> list[Tensor]:
        """Logits of each step, [pairs, columns] each; those of step j count from position j - 1 on."""
        states, tokens = lesson.states.float(), lesson.token_ids[: len(lesson)]
        n = len(states)
        embedded = self._normed(self.embeddings[tokens], self.input_norm)
        x = functional.linear(states, self.fc)
        cos, sin = self.rotary(x, torch.arange(n)[None])
        shared = self.config.num_attention_heads // self._num_keys
        place = torch.arange(n)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        found = []
        for step in range(num):
            both = torch.cat((embedded, self._normed(x, self.state_norm)), dim=-1)
            q, k, v = (
                functional.linear(both, weight).view(1, n, -1, self._head_dim).transpose(1, 2)
                for weight in (self.query, self.key, self.value)
            )
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            keys.append(k.repeat_interleave(shared, 1))
            values.append(v.repeat_interleave(shared, 1))
            # Those of the target's states, and of each later step the one position on the way.
            scores = (q @ keys[0].transpose(-1, -2)).masked_fill(place[None] > place[:, None] - step, -torch.inf)
            ways = [((place - (step - own)).clamp(min=0), own) for own in range(1, step + 1)]
            on_the_way = [(q * keys[own][:, :, at]).sum(-1, keepdim=True) for at, own in ways]
            weights = (torch.cat([scores, *on_the_way], dim=-1) * self._head_dim**-0.5).softmax(dim=-1)
            seen = weights[..., :n] @ values[0]
            for number, (at, own) in enumerate(ways):
                seen = seen + weights[..., n + number : n + number + 1] * values[own][:, :, at]
            y = x + functional.linear(seen.transpose(1, 2).reshape(n, -1), self.out)
            inner = self._normed(y, self.mlp_norm)
            gated = functional.silu(functional.linear(inner, self.gate)) * functional.linear(inner, self.up)
            y = y + functional.linear(gated, self.down)
            found.append(functional.linear(self._normed(y, self.norm), self.head))
            # The state that the next step reads at a position is this step's at the one before.
            x = torch.cat((y[:1], y[:-1]))
        return found

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], weight, self.config.rms_norm_eps)

    def columns(self, tokens: Tensor) -> Tensor:
        """The column of each token, -1 where there is none."""
        return tokens if self._columns is None else self._columns[tokens]


def layer_config(target: Any) -> LlamaConfig:
    """A layer of the target's sizes; `target` is the config of its text model."""
    num_heads = int(target.num_attention_heads)
    return LlamaConfig(
        vocab_size=int(target.vocab_size),
        hidden_size=int(target.hidden_size),
        intermediate_size=int(target.intermediate_size),
        num_hidden_layers=1,
        num_attention_heads=num_heads,
        num_key_value_heads=int(getattr(target, "num_key_value_heads", None) or num_heads),
        head_dim=int(getattr(target, "head_dim", None) or target.hidden_size // num_heads),
        rms_norm_eps=float(getattr(target, "rms_norm_eps", 1e-5)),
        max_position_embeddings=int(target.max_position_embeddings),
        tie_word_embeddings=False,
    )


def eagle3_loss(network: Eagle3Training, lessons: Sequence[Eagle3Lesson], recipe: Recipe) -> Tensor:
    """Weighted mean over answered positions and steps; as `head_loss`."""
    total, weights = torch.zeros(()), 0.0
    for lesson in lessons:
        # The final state of pair i + 1 says what follows token i.
        first = max(lesson.num_before - 1, 0)
        taught = functional.linear(lesson.final[1 - (lesson.num_before > 0) :].float(), network.head).softmax(dim=-1)
        wanted = network.columns(lesson.token_ids[1:])
        for step, logits in enumerate(network.steps(lesson, recipe.num_unrolled)):
            begin = max(first, step)
            num = min(len(lesson) - begin, len(taught) - (begin - first))
            if num < 1:
                continue
            log_q = logits[begin : begin + num].log_softmax(dim=-1)
            p = taught[begin - first : begin - first + num]
            column = wanted[begin : begin + num]
            hard = -log_q.gather(-1, column.clamp(min=0)[:, None]).squeeze(-1) * (column >= 0)
            share, weight = recipe.hard_label_share, DECAY**step
            soft = -(p * log_q).sum(dim=-1)
            total = total + weight * ((1 - share) * soft + share * hard).sum()
            weights += weight * num
    return total / max(weights, 1.0)


@torch.inference_mode()
def judge_eagle3(
    network: Eagle3Training, lessons: Iterable[Eagle3Lesson], num_draft_tokens: int
) -> tuple[dict[str, MeasuredDraft], MeasuredDraft]:
    """Acceptance on held-out texts, by task and of all, without decoding: see `distil.judge`."""
    found: defaultdict[str, list[tuple[AcceptanceCounts, Tensor]]] = defaultdict(list)
    for lesson in lessons:
        begin, wanted = max(lesson.num_before, 0), network.columns(lesson.token_ids[1:])
        steps = network.steps(lesson, num_draft_tokens)
        if len(lesson) - begin < 2:
            continue
        # A round at a pair: its first draft is the first step's there, the next one the second step's behind it.
        matches = [
            (logits[begin + step :].argmax(dim=-1) == wanted[begin + step :]).tolist()
            for step, logits in enumerate(steps)
        ]
        p = functional.linear(lesson.final[1 : len(lesson) - begin + 1].float(), network.head).softmax(dim=-1)
        overlap = torch.minimum(p, steps[0][begin : begin + len(p)].softmax(dim=-1)).sum(dim=-1)
        found[lesson.task].append((walk_drafts(matches, len(lesson) - begin + 1), overlap))
    by_task = {task: measured_draft(texts) for task, texts in sorted(found.items())}
    return by_task, measured_draft([text for texts in found.values() for text in texts])


class Eagle3Heads:
    """EAGLE-3 heads of a target, from what was recorded to the folder that `method = "eagle3"` and vLLM load."""

    def __init__(self, target: Any, token_ids: Tensor | None, taps: tuple[int, ...], recipe: Recipe) -> None:
        """`target`: a transformers model; `token_ids`: what is drafted, None: all; `taps`: layers that are read."""
        embeddings = target.get_input_embeddings().weight.detach().cpu()
        head = target.get_output_embeddings().weight.detach().cpu()
        config = layer_config(text_config(target.config))
        norm = torch.ones(config.hidden_size)
        self._num_layers, self._taps, self._recipe = int(text_config(target.config).num_hidden_layers), taps, recipe
        self.network = Eagle3Training(
            config,
            embeddings,
            head if token_ids is None else head[token_ids],
            norm,
            token_ids,
            num_taps=len(taps),
            seed=recipe.seed,
        )

    def lessons(self, recorded: Sequence[RecordedText]) -> list[Eagle3Lesson]:
        """Texts that are long enough to draft in."""
        return [one for one in map(Eagle3Lesson.of, recorded) if one is not None]

    def loss(self, lessons: Sequence[Eagle3Lesson]) -> Tensor:
        """Of a batch."""
        return eagle3_loss(self.network, lessons, self._recipe)

    def judge(self, recorded: Sequence[RecordedText]) -> tuple[dict[str, MeasuredDraft], MeasuredDraft]:
        """On held-out texts."""
        return judge_eagle3(self.network, self.lessons(recorded), self._recipe.num_unrolled)

    def save(self, folder: Path, dtype: torch.dtype, facts: dict[str, Any]) -> None:
        """Write the folder. `facts`: of the target, for config.json."""
        network = self.network
        named = {
            "fc": network.fc,
            "midlayer.self_attn.q_proj": network.query,
            "midlayer.self_attn.k_proj": network.key,
            "midlayer.self_attn.v_proj": network.value,
            "midlayer.self_attn.o_proj": network.out,
            "midlayer.mlp.gate_proj": network.gate,
            "midlayer.mlp.up_proj": network.up,
            "midlayer.mlp.down_proj": network.down,
            "midlayer.input_layernorm": network.input_norm,
            "midlayer.hidden_norm": network.state_norm,
            "midlayer.post_attention_layernorm": network.mlp_norm,
            "norm": network.norm,
            "lm_head": network.head,
        }
        tensors = {f"{name}.weight": one.detach().to(dtype).contiguous() for name, one in named.items()}
        vocabulary = len(network.embeddings)
        known = torch.arange(vocabulary) if network.token_ids is None else network.token_ids
        tensors["d2t"] = known - torch.arange(len(known))
        tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, known, True)
        config = network.config.to_dict() | facts
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(known),
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": list(self._taps),
            "num_target_layers": self._num_layers,
        }
        write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
