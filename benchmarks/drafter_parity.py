"""Whether drafts are those of vLLM from the same checkpoint, in every round of six prompts.

    python -m benchmarks.drafter_parity --vllm-python .venv-vllm/bin/python

Makes a small Llama with random weights and, for it, EAGLE-3 heads in vLLM's and in `speculators`' form, Medusa heads
and a draft model, all in float32. vLLM's CPU build decodes six prompts greedily with each, one at a time; its proposers
are wrapped, so that every proposal is noted. The engine decodes the same prompts. A round counts as equal where its
drafts are vLLM's, as far as both drafted: near the end of a text vLLM drafts beyond the limit. Last line: JSON. The
exit code is 1 where a round differs, or a method did not run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NUM_PROMPTS, MAX_TOKENS, K = 6, 48, 3
NUM_TOKENS, HIDDEN, NUM_LAYERS = 288, 128, 6
METHODS = ("eagle3", "eagle3 of speculators", "medusa", "draft_model")


def main() -> int:
    """The comparison; 0 where everything is equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm-python", required=True, help="interpreter of an environment with vLLM")
    parser.add_argument("--method", action="append", choices=METHODS, help="only these")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        _make(folder, options.seed)
        rng = random.Random(options.seed)
        prompts = [[rng.randrange(3, NUM_TOKENS) for _ in range(rng.randint(5, 60))] for _ in range(NUM_PROMPTS)]
        (folder / "prompts.json").write_text(json.dumps(prompts))
        for method in options.method or METHODS:
            found[method] = _compared(folder, method, prompts, options.vllm_python)
            print(f"{method:<24}{found[method]}", flush=True)
    print(json.dumps({"num_prompts": NUM_PROMPTS, "k": K, "methods": found}))
    return 0 if all(one.get("equal") == one.get("rounds") and one.get("rounds") for one in found.values()) else 1


def _compared(folder: Path, method: str, prompts: list[list[int]], python: str) -> dict[str, Any]:
    log = folder / "vllm.log"
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("w") as words:
        command = [python, str(Path(__file__).resolve()), "vllm", str(folder), method]
        ended = subprocess.run(command, stdout=words, stderr=subprocess.STDOUT, env=environment, check=False)
    if ended.returncode:
        return {"failed": " ".join(log.read_text().split()[-40:])}
    theirs = json.loads((folder / "vllm.json").read_text())
    ours = _ours(folder, method, prompts)
    rounds = equal = accepted = 0
    for one, other in zip(ours, theirs, strict=True):
        assert one["text"] == other["text"], "the targets' texts differ"
        accepted += one["accepted"]
        for drafts, wanted in zip(one["drafts"], other["drafts"], strict=False):
            num = min(len(drafts), len(wanted))
            rounds += 1
            equal += num > 0 and drafts[:num] == wanted[:num]
    return {"rounds": rounds, "equal": equal, "accepted": accepted}


def _ours(folder: Path, method: str, prompts: list[list[int]]) -> list[dict[str, Any]]:
    from alphaloop.deciding.policy import Decision, Reason
    from alphaloop.messages import Job, Mode
    from alphaloop.settings.models import (
        DraftModelDrafterSettings,
        HeadsDrafterSettings,
        ModelSettings,
        TargetSettings,
    )
    from worker.decoding.engine import load_engine
    from worker.engine import PreparedJob, Sampling

    source = str(folder / method)
    kind: Any = "heads" if method == "medusa" else "eagle3"
    settings = (
        DraftModelDrafterSettings(source=source, max_draft_tokens=K)
        if method == "draft_model"
        else HeadsDrafterSettings(method=kind, source=source, max_draft_tokens=K)
    )
    target = TargetSettings(name="tiny", source=str(folder / "target"), dtype="float32", device="cpu")
    engine = load_engine(ModelSettings(target=target, drafters={"made": settings}), num_slots=1)
    propose, drafts = engine._drafters["made"].propose, list[Any]()

    def noted(asks: Any) -> Any:
        answers = propose(asks)
        drafts.extend(list(one.tokens) for one in answers)
        return answers

    engine._drafters["made"].propose = noted  # type: ignore[method-assign]
    decided = Decision(Mode.SPECULATIVE, "made", "1", K, Reason.FORCED, "parity")
    found = []
    for number, prompt in enumerate(prompts):
        job = Job.model_validate({"job_id": f"{number}", "task": "parity", "body": {"prompt": "-"}})
        sampling = Sampling(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        engine.admit(PreparedJob(job, tuple(prompt), sampling), decided)
        drafts.clear()
        while not (finished := engine.step().finished):
            pass
        one = finished[0]
        found.append({"text": list(one.token_ids), "drafts": list(drafts), "accepted": one.counts.num_accepted})
    return found


def _vllm(folder: Path, method: str) -> None:
    """In vLLM's environment: decode, and write down what its proposer proposed in each round."""
    from vllm import LLM, SamplingParams
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.spec_decode.medusa import MedusaProposer

    drafts: list[list[int]] = []

    def note(proposer: Any) -> None:
        propose = proposer.propose

        def noted(*args: Any, **more: Any) -> Any:
            answers = propose(*args, **more)
            drafts.append(answers[0].tolist())
            return answers

        proposer.propose = noted

    note(SpecDecodeBaseProposer)
    note(MedusaProposer)
    kind = {"eagle3 of speculators": "eagle3"}.get(method, method)
    llm = LLM(
        model=str(folder / "target"),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=1,
        enable_prefix_caching=False,
        async_scheduling=False,
        speculative_config={"method": kind, "model": str(folder / method), "num_speculative_tokens": K},
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    found = []
    for prompt in json.loads((folder / "prompts.json").read_text()):
        drafts.clear()
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        found.append({"text": list(answer.outputs[0].token_ids), "drafts": list(drafts)})
    (folder / "vllm.json").write_text(json.dumps(found))


def _make(folder: Path, seed: int) -> None:
    """The target, and what drafts for it. Random, but that heads share the target's own head: some is accepted."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": NUM_TOKENS,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    target: Any = LlamaForCausalLM(LlamaConfig(num_hidden_layers=NUM_LAYERS, **sizes))
    target.eval()
    target.save_pretrained(folder / "target")
    noisy = LlamaForCausalLM(target.config)
    noisy.load_state_dict(target.state_dict())
    with torch.no_grad():
        for weight in noisy.parameters():
            weight.data += 0.05 * weight.std() * torch.randn_like(weight)
    noisy.model.layers = noisy.model.layers[: NUM_LAYERS - 1]
    noisy.config.num_hidden_layers = NUM_LAYERS - 1
    noisy.save_pretrained(folder / "draft_model")
    letters = {name: number for number, name in enumerate(["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    letters |= {f"<{number}>": number for number in range(len(letters), NUM_TOKENS)}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name in ("target", "draft_model"):
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder / name)  # type: ignore[no-untyped-call]
    head = target.lm_head.weight.detach()

    def write(name: str, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        copies = {key: one.detach().clone().contiguous() for key, one in tensors.items()}
        save_file(copies, folder / name / "model.safetensors")

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape) * 0.1

    medusa = {f"blocks.{one}.layers.0.weight": noise(HIDDEN, HIDDEN) for one in range(K)}
    medusa |= {f"lm_heads.{one}.weight": head for one in range(K)}
    fields = {"hidden_size": HIDDEN, "vocab_size": NUM_TOKENS, "num_heads": K, "num_hidden_layers": 1}
    write("medusa", {"model_type": "medusa", "architectures": ["MedusaModel"], **fields}, medusa)
    # The layer of a decoder, of which half of the tokens can be drafted.
    known = torch.arange(0, NUM_TOKENS, 2)
    layer = {f"layers.0.{name}": noise(*one.shape) for name, one in target.model.layers[0].state_dict().items()}
    for name in "qkv":
        size = layer[f"layers.0.self_attn.{name}_proj.weight"].shape[0]
        layer[f"layers.0.self_attn.{name}_proj.weight"] = noise(size, 2 * HIDDEN)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        layer[f"layers.0.{name}.weight"] = 1 + noise(HIDDEN)
    tensors = {
        **layer,
        "fc.weight": noise(HIDDEN, 3 * HIDDEN),
        "norm.weight": 1 + noise(HIDDEN),
        "lm_head.weight": head[known],
        "d2t": known - torch.arange(len(known)),
        "t2d": torch.zeros(NUM_TOKENS, dtype=torch.bool).index_fill_(0, known, True),
        "embed_tokens.weight": target.model.embed_tokens.weight,
    }
    layers = {**sizes, "num_hidden_layers": 1, "model_type": "llama", "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    more = {"draft_vocab_size": len(known), "eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    plain = {name.replace("layers.0.", "midlayer."): one for name, one in tensors.items()}
    write("eagle3", {**layers, **more, "architectures": ["LlamaForCausalLMEagle3"]}, plain)
    proposal = {"proposal_type": "greedy", "speculative_tokens": K}
    verifier = {"name_or_path": str(folder / "target"), "architectures": ["LlamaForCausalLM"]}
    nested = {
        **more,
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "transformer_layer_config": layers,
    }
    write("eagle3 of speculators", nested, tensors)


if __name__ == "__main__":
    if sys.argv[1:2] == ["vllm"]:
        _vllm(Path(sys.argv[2]), sys.argv[3])
    else:
        sys.exit(main())
