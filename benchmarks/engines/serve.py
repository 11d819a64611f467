"""Start one real inference server and keep it until Ctrl-C.

    python -m benchmarks.engines.serve vllm                        # SmolLM2 on port 8001, without drafts
    python -m benchmarks.engines.serve vllm-ngram --port 8002      # the same, drafting by looking texts up, k = 4
    python -m benchmarks.engines.serve vllm-draft --model TARGET --draft DRAFT
    python -m benchmarks.engines.serve vllm-lookup         # the same with our look-up inside vLLM
    python -m benchmarks.engines.serve llama-cpp --cores 2
    python -m benchmarks.engines.serve llama-cpp-ngram

`make engine SERVER=vllm-ngram` installs what the server needs first. It has one thread; its log is
.alphaloop/benchmarks/engines/NAME.log. The last line says where it listens.
"""

from __future__ import annotations

import argparse
import signal
import sys
from typing import Any, Final

from alphaloop.errors import AlphaloopError
from benchmarks.contestants.process import REPOSITORY
from benchmarks.engines.options import add_vllm
from benchmarks.engines.server import Server, llama_cpp, running, vllm
from benchmarks.engines.vllm_lookup import NUM_DRAFT_TOKENS, vllm_lookup
from benchmarks.engines.weights import dense_folder, packaged_gguf

FOLDER: Final = REPOSITORY / ".alphaloop" / "benchmarks" / "engines"
NAMES: Final = ("vllm", "vllm-ngram", "vllm-lookup", "vllm-draft", "llama-cpp", "llama-cpp-ngram")
LLAMA_PYTHON: Final = REPOSITORY / ".venv-llama" / "bin" / "python"
NGRAM: Final[dict[str, Any]] = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}


def draft_model(folder: str, k: int = 3) -> dict[str, Any]:
    """vLLM's --speculative-config of a draft model."""
    return {"method": "draft_model", "model": folder, "num_speculative_tokens": k}


def main() -> int:
    """Start it, say where it is, wait."""
    options = _options()
    try:
        server = _server(options)
        with running([server], FOLDER, options.cores):
            print(f"{server.name} listens at {server.url}", flush=True)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
            signal.sigwait({signal.SIGTERM, signal.SIGINT})
    except (AlphaloopError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _server(options: argparse.Namespace) -> Server:
    name, port = options.server, options.port
    if name.startswith("llama-cpp"):
        gguf = options.model or str(packaged_gguf())
        return llama_cpp(name, str(LLAMA_PYTHON), gguf, port, drafts=name.endswith("ngram"))
    speculative = {"vllm-ngram": NGRAM, "vllm-draft": draft_model(options.draft or "")}.get(name)
    if name == "vllm-draft" and not options.draft:
        raise ValueError("vllm-draft needs --draft, the folder of its draft model")
    model = options.model or str(dense_folder(options.dtype))
    if name == "vllm-lookup":
        return vllm_lookup(
            name,
            str(options.vllm_python),
            model,
            port,
            k=options.k,
            remember_tasks=options.remember,
            dtype=options.dtype,
        )
    return vllm(name, str(options.vllm_python), model, port, speculative=speculative, dtype=options.dtype)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engines.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("server", choices=NAMES)
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--model", default=None, help="folder (vLLM) or .gguf file (llama.cpp); SmolLM2 if not given")
    parser.add_argument("--draft", default=None, help="folder of the draft model of vllm-draft")
    parser.add_argument("--k", type=int, default=NUM_DRAFT_TOKENS, help="longest draft of vllm-lookup")
    parser.add_argument(
        "--remember",
        type=lambda text: text.split(","),
        default=[],
        help="tasks in whose earlier results vllm-lookup looks things up: sql,code",
    )
    parser.add_argument("--dtype", default="bfloat16", help="of vLLM")
    add_vllm(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
