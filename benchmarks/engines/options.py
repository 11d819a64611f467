"""Options that several benchmarks of inference servers have; each adds its own beside them."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Final

from benchmarks.contestants.process import REPOSITORY

VLLM_PYTHON: Final = REPOSITORY / ".venv-vllm" / "bin" / "python"


def add_vllm(parser: ArgumentParser) -> None:
    """Where the vLLM servers run: `cores`, `vllm_python`."""
    parser.add_argument("--cores", type=_numbers, default=[], help="of the servers: 0,1; all if not given")
    parser.add_argument("--vllm-python", type=Path, default=VLLM_PYTHON, help="of an environment with vLLM")


def add_pair(parser: ArgumentParser) -> None:
    """What the two servers decode with: `model`, `draft`, `threads`."""
    parser.add_argument("--model", default=None, help="folder of the target; SmolLM2 if not given")
    parser.add_argument("--draft", default=None, help="folder of a draft model; look-up if not given")
    parser.add_argument("--threads", type=int, default=1, help="of each server")


def add_prompts(parser: ArgumentParser, *, max_tokens: int, max_characters: int) -> None:
    """What is decoded: `prompts`, `max_tokens`, `max_characters`."""
    parser.add_argument("--prompts", type=Path, default=None, help="folder with TASK.jsonl files")
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help="of a text")
    parser.add_argument("--max-characters", type=int, default=max_characters, help="longer prompts are left out")


def add_run(parser: ArgumentParser, *, timeout_s: float) -> None:
    """How it is run: `timeout_s`, `seed`."""
    parser.add_argument("--timeout-s", type=float, default=timeout_s, help="without any result")
    parser.add_argument("--seed", type=int, default=0)


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]
