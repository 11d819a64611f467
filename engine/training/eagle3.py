"""EAGLE-3 heads of a target, trained as they will draft: on the target's states first, then on their own.

A pass over a text with the target's states at every position is the first step. In step j the state at a position is
the one that step j - 1 gave for the position before, as in a draft of j tokens; its queries see the target's states up
to j - 1 positions before, then the keys of the steps between ("training-time test", Li et al. 2025, arXiv
2503.01840). So each step costs a pass, and every position is the beginning of a draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter, functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from engine.drafters.head_files import take
from engine.training.distil import Judged, walk_rounds
from engine.training.heads import DECAY, HeadsInTraining
from engine.training.recipe import Recipe
from engine.training.recording import RecordedText

#: Standard deviation of the weights at the beginning.
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
        """The lesson of a recorded text; None where too little was recorded."""
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


class Eagle3HeadsInTraining(HeadsInTraining[Eagle3Lesson]):
    """`engine.drafters.eagle3.Eagle3Network`, trained on texts one by one; `method = "eagle3"` and vLLM load it."""

    def __init__(
        self,
        embeddings: Tensor,
        head: Tensor,
        token_ids: Tensor | None,
        recipe: Recipe,
        *,
        target: Any,
        taps: tuple[int, ...],
    ) -> None:
        """As `HeadsInTraining`; `target`: the config of its text model; `taps`: its layers that are read."""
        super().__init__(embeddings, head, token_ids, recipe)
        self.layer, self._taps = layer_config(target), taps
        hidden, inner = self.layer.hidden_size, self.layer.intermediate_size
        num_heads = self.layer.num_attention_heads
        self._num_keys = self.layer.num_key_value_heads or num_heads
        self._head_dim = self.layer.head_dim or hidden // num_heads
        size, keys = num_heads * self._head_dim, self._num_keys * self._head_dim

        def random(*shape: int) -> Parameter:
            return Parameter(_SPREAD * torch.randn(shape, generator=self._generator))

        self.fc = random(hidden, len(taps) * hidden)
        self.query, self.key, self.value = random(size, 2 * hidden), random(keys, 2 * hidden), random(keys, 2 * hidden)
        self.out, self.gate, self.up = random(hidden, size), random(inner, hidden), random(inner, hidden)
        self.down = random(hidden, inner)
        self.input_norm, self.state_norm, self.mlp_norm, self.norm = (Parameter(torch.ones(hidden)) for _ in range(4))
        self.rotary = LlamaRotaryEmbedding(self.layer)

    def steps(self, lesson: Eagle3Lesson, num: int) -> list[Tensor]:
        """Logits of each step, [pairs, columns] each; those of step j count from position j - 1 on."""
        states, tokens = lesson.states.float(), lesson.token_ids[: len(lesson)]
        n = len(states)
        embedded = self._normed(self.embeddings[tokens], self.input_norm)
        x = functional.linear(states, self.fc)
        cos, sin = self.rotary(x, torch.arange(n)[None])
        shared = self.layer.num_attention_heads // self._num_keys
        place = torch.arange(n)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        steps = []
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
            steps.append(self.logits(self._normed(y, self.norm)))
            # The state that the next step reads at a position is this step's at the one before.
            x = torch.cat((y[:1], y[:-1]))
        return steps

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], weight, self.layer.rms_norm_eps)

    def lessons(self, recorded: Iterable[RecordedText]) -> list[Eagle3Lesson]:
        """Those of two pairs or more."""
        return [lesson for lesson in map(Eagle3Lesson.of, recorded) if lesson is not None]

    def loss(self, lessons: Sequence[Eagle3Lesson]) -> Tensor:
        """Over answered positions."""
        total, weights = torch.zeros(()), 0.0
        for lesson in lessons:
            # The final state of pair i + 1 says what follows token i.
            first = max(lesson.num_before - 1, 0)
            taught = self.logits(lesson.final[1 - (lesson.num_before > 0) :].float()).softmax(dim=-1)
            wanted = self.columns(lesson.token_ids[1:])
            for step, logits in enumerate(self.steps(lesson, self.recipe.num_unrolled)):
                begin = max(first, step)
                num = min(len(lesson) - begin, len(taught) - (begin - first))
                if num < 1:
                    continue
                rows, weight = slice(begin, begin + num), DECAY**step
                losses = self.token_loss(logits[rows], taught[begin - first : begin - first + num], wanted[rows])
                total = total + weight * losses.sum()
                weights += weight * num
        return total / max(weights, 1.0)

    def judged(self, recorded: Sequence[RecordedText]) -> Iterator[Judged]:
        """Over all texts with two answered pairs or more."""
        for lesson in self.lessons(recorded):
            begin, wanted = max(lesson.num_before, 0), self.columns(lesson.token_ids[1:])
            steps = self.steps(lesson, self.recipe.num_unrolled)
            if len(lesson) - begin < 2:
                continue
            # A round at a pair: its first draft is the first step's there, the next one the second step's after it.
            matches = [
                (logits[begin + step :].argmax(dim=-1) == wanted[begin + step :]).tolist()
                for step, logits in enumerate(steps)
            ]
            p = self.logits(lesson.final[1 : len(lesson) - begin + 1].float()).softmax(dim=-1)
            overlap = torch.minimum(p, steps[0][begin : begin + len(p)].softmax(dim=-1)).sum(dim=-1)
            yield lesson.task, walk_rounds(matches, len(lesson) - begin + 1), overlap

    def network(self) -> dict[str, Parameter]:
        """As vLLM's `LlamaForCausalLMEagle3` names them."""
        named = {
            "fc": self.fc,
            "midlayer.self_attn.q_proj": self.query,
            "midlayer.self_attn.k_proj": self.key,
            "midlayer.self_attn.v_proj": self.value,
            "midlayer.self_attn.o_proj": self.out,
            "midlayer.mlp.gate_proj": self.gate,
            "midlayer.mlp.up_proj": self.up,
            "midlayer.mlp.down_proj": self.down,
            "midlayer.input_layernorm": self.input_norm,
            "midlayer.hidden_norm": self.state_norm,
            "midlayer.post_attention_layernorm": self.mlp_norm,
            "norm": self.norm,
        }
        return {f"{name}.weight": weight for name, weight in named.items()}

    def take_token_ids(self, tensors: dict[str, Tensor], num_columns: int) -> Tensor | None:
        """Offsets, `d2t`; the mask `t2d` says the same."""
        tensors.pop("t2d", None)
        return None if "d2t" not in tensors else take(tensors, "d2t", (num_columns,)) + torch.arange(num_columns)

    def tensors(self) -> dict[str, Tensor]:
        """As `Eagle3Network` and vLLM take them."""
        known = torch.arange(len(self.embeddings)) if self.token_ids is None else self.token_ids
        drafted = torch.zeros(len(self.embeddings), dtype=torch.bool).index_fill_(0, known, True)
        return {
            **self.network(),
            "lm_head.weight": self.head,
            "d2t": known - torch.arange(len(known)),
            "t2d": drafted,
        }

    def config(self) -> dict[str, Any]:
        """As `head_files` and vLLM read it."""
        return self.layer.to_dict() | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(self.head),
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": list(self._taps),
        }


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
