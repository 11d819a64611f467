"""`alphaloop measure`: whether speculation pays on the user's own prompts, as tables and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import typer
from pydantic_core import to_jsonable_python
from rich.table import Table
from rich.text import Text

from alphaloop.cli.children import carry_out
from alphaloop.cli.options import example
from alphaloop.cli.screen import out, print_json, table
from alphaloop.commands import MeasureOrder
from alphaloop.payoff.figures import Exactness, Figures, RatioBounds, ShipVerdict, Tails
from alphaloop.payoff.report import Footprint, Report, Row, best_of
from alphaloop.payoff.targets import TargetsReport
from alphaloop.wording import rate, share, share_with_interval

_STYLES: Final = {
    ShipVerdict.SHIP: "bold green",
    ShipVerdict.DO_NOT_SHIP: "bold red",
    ShipVerdict.TOO_CLOSE: "bold yellow",
}
_FEW_FOR_P99: Final = 100
#: The reason that is shown for a candidate although its drafter has a faster one.
SHORTER_IS_BETTER: Final = "k_too_high"


@example("""\
alphaloop measure --prompts mine.jsonl --task chat --max-tokens 128
alphaloop measure --prompts my.jsonl --drafter lookup --k 2 --k 6 --bar 1.2
alphaloop measure --prompts mine.jsonl --target ./base --target ./fine-tuned
head -n 50 batch.jsonl | alphaloop measure --prompts - --batch 4 --json""")
def measure(
    context: typer.Context,
    prompts: Path = typer.Option(help="JSONL in any form that `alphaloop enqueue` takes; - for standard input."),
    target: list[str] = typer.Option([], help="Give it twice, to compare two models without drafts.", metavar="MODEL"),
    task: str | None = typer.Option(None, help="Task whose settings are the defaults of the prompts."),
    max_tokens: int | None = typer.Option(None, min=1, help="Upper bound on generated tokens, for every prompt."),
    temperature: float | None = typer.Option(None, min=0.0, max=2.0, help="0 is greedy; for every prompt."),
    num: int = typer.Option(100, min=10, help="Most prompts to measure; drawn at random if there are more."),
    drafter: list[str] = typer.Option([], help="Only this drafter of configs/models.toml; may be repeated."),
    k: list[int] = typer.Option([], "--k", min=1, help="Draft length; may be repeated. 2, 4 and 8 if not given."),
    batch: int = typer.Option(1, min=1, max=256, help="Prompts decoded together."),
    repeats: int = typer.Option(1, min=1, help="How often every prompt is decoded with every setting."),
    bar: float = typer.Option(1.3, min=0.1, help="Speed-up over vanilla that is worth shipping."),
    seed: int = typer.Option(0, help="Seed of the order of decoding and of the choice of prompts."),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON, every paired ratio included."),
) -> None:
    """Measure whether speculation pays on your own prompts.

    The verdict on each setting is: ship, do not ship, or too close.

    Decodes 30 to 100 prompts with the configured target, vanilla and with each drafter and draft length in turn, in
    random order, and compares them prompt by prompt: speed with bounds, tails, acceptance, memory, texts, and reasons.
    Needs neither broker nor database. Ctrl-C reports what was measured so far.

    With --target twice: the times of two models on the same prompts, and which of their texts differ. A model is a
    folder, a .gguf file, package:NAME or a hub name; everything else is as in [models.target].
    """

    def shown(report: Report) -> None:
        print_json(report_as_json(report)) if as_json else show(report)

    def compared(report: TargetsReport) -> None:
        print_json(targets_as_json(report)) if as_json else show_targets(report)

    first_note = "stopping after this round; what was measured is reported. Ctrl-C again ends at once"
    order = MeasureOrder(**context.params)
    if target:
        carry_out(context, order, TargetsReport, compared, on_interrupt=first_note)
    else:
        carry_out(context, order, Report, shown, on_interrupt=first_note)


def show(report: Report) -> None:
    """Tables, then the verdicts and their reasons."""
    console = out()
    everything = [report.vanilla, *(row.figures for row in report.rows)]

    def say(lines: Iterable[str], indent: str = "") -> None:
        for line in lines:
            console.print(_wrapped(line, console.width, indent))

    say(_head(report))
    console.print()
    console.print(_speeds(report))
    console.print()
    console.print(_tails(everything))
    if len(report.vanilla.acceptance.by_prompt) * report.setup.num_repeats < _FEW_FOR_P99:
        console.print(Text("With fewer than 100 texts p99 is close to the slowest one.", style="dim"))
    console.print()
    console.print(_acceptance(report.rows))
    console.print()
    console.print(_memory(report.footprint))
    held = report.footprint
    gpus = "".join(f"; on {device} {_bytes(number)}" for device, number in held.bytes_by_device.items())
    say([f"The process held at most {_bytes(held.peak_process_bytes)}{gpus}."])
    console.print()
    say(_exactness(report.rows), "  ")
    console.print()
    for line, bounds_text in _verdicts(report):
        say([line], "  ")
        say((f"  - {sentence}" for sentence in bounds_text), "    ")
    console.print()
    say(_conclusion(report))


def _wrapped(line: str, width: int, indent: str) -> Text:
    """Further lines begin with `indent`; a verdict has its colour."""
    text = Text(textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False))
    for verdict, style in _STYLES.items():
        text.highlight_words([verdict.upper()], style)
    return text


def _head(report: Report) -> Iterator[str]:
    setup, identity = report.setup, report.setup.identity
    yield f"{identity.target} on {identity.shown}"
    sampling = "greedy" if setup.temperature == 0 else f"temperature {setup.temperature:g}"
    yield (
        f"{setup.num_prompts} prompts of {setup.prompt_tokens:.0f} tokens, {sampling}, batch {setup.batch}, "
        f"answers of {report.vanilla.output_tokens:.0f} tokens (medians; at most {setup.max_tokens}), seed {setup.seed}"
    )
    if report.num_turns < report.num_turns_planned:
        planned = report.num_turns_planned
        yield f"INTERRUPTED: {report.num_turns} of {planned} batches were measured; what follows is theirs alone"


def _speeds(report: Report) -> Table:
    made = table("candidate", "tokens/s", "x vanilla [95 %]", "median [95 %]", "verdict", right=["tokens/s"])
    made.add_row("vanilla", rate(report.vanilla.tokens_per_s), "", "", "")
    for row in report.rows:
        verdict = row.judgement.verdict
        figures, shown = row.figures, Text(verdict.upper(), style=_STYLES[verdict])
        made.add_row(
            row.candidate.name, rate(figures.tokens_per_s), _ratio(figures.ratio), _ratio(figures.median), shown
        )
    return made


def _ratio(bounds: RatioBounds) -> str:
    bounds_text = "no bounds" if bounds.known is None else f"{bounds.known[0]:.2f} {bounds.known[1]:.2f}"
    return f"{bounds.estimate:.2f} [{bounds_text}]"


def _tails(everything: Sequence[Figures]) -> Table:
    made = table(
        "p50 p95 p99 of texts", *(columns := ["first token, ms", "ms a token", "whole text, s"]), right=columns
    )
    for figures in everything:
        cells = [(figures.first_token_s, 1000.0), (figures.token_s, 1000.0), (figures.response_s, 1.0)]
        made.add_row(figures.candidate.name, *(_three(tails, factor) for tails, factor in cells))
    return made


def _three(tails: Tails | None, factor: float) -> str:
    """In columns of their own inside the cell, with three digits each."""
    if tails is None:
        return "-"
    values = [factor * value for value in (tails.p50, tails.p95, tails.p99)]
    return " ".join(f"{v:>5.2f}" if v < 10 else f"{v:>5.1f}" if v < 100 else f"{v:>5.0f}" for v in values)


def _acceptance(rows: Sequence[Row]) -> Table:
    numbers = ["tokens a round", "proposed", "empty"]
    made = table("acceptance", *numbers, "α [95 %]", "α_1, α_2 …", right=numbers)
    for row in rows:
        seen = row.figures.acceptance
        by_position = [seen.counts.alpha_at(i) for i in range(1, len(seen.counts.trials) + 1)]
        made.add_row(
            row.candidate.name,
            f"{seen.tokens_per_round:.2f}",
            f"{seen.proposed_per_round:.2f}",
            f"{100 * seen.empty_share:.0f} %",
            share_with_interval(seen.alpha),
            " ".join(share(a) for a in by_position),
        )
    return made


def _memory(footprint: Footprint) -> Table:
    sizes = ["weights", "a token", "a full slot"]
    made = table("memory", "on", *sizes, right=sizes)
    for part in footprint.parts:
        numbers = part.weight_bytes, part.kv_bytes_per_token, part.kv_bytes_per_slot
        made.add_row(part.name, part.device, *map(_bytes, numbers))
    return made


def _exactness(rows: Sequence[Row]) -> Iterator[str]:
    if all(row.figures.exactness.num_equal == row.figures.exactness.num_compared > 0 for row in rows):
        yield "Texts: every candidate wrote exactly what vanilla wrote."
        return
    for row in rows:
        yield f"Texts of {row.candidate.name}: {_compared(row.figures.exactness)}"


def _compared(exactness: Exactness) -> str:
    if not exactness.num_compared:
        return "drawn without a seed, so there is nothing to compare."
    parts = [f"{exactness.num_equal} of {exactness.num_compared} as vanilla's"]
    if exactness.num_near_ties:
        parts.append(f"{exactness.num_near_ties} differ at a near-tie")
    if exactness.num_unexamined:
        parts.append(f"{exactness.num_unexamined} differ and were not examined")
    if exactness.num_wrong:
        parts.append(f"{exactness.num_wrong} DIFFER WHERE THE TARGET IS SURE: a bug, please report it")
    return ", ".join(parts) + "."


def _verdicts(report: Report) -> Iterator[tuple[str, list[str]]]:
    """The verdict and all reasons of every drafter's best candidate; for the others, that a shorter draft is better."""
    for drafter in dict.fromkeys(row.candidate.drafter or "" for row in report.rows):
        best = best_of(report.rows, drafter)
        yield _verdict(report, best), [sentence for _, sentence in best.reasons]
        for row in report.rows:
            if row.candidate.drafter == drafter and row is not best:
                yield _verdict(report, row), [sentence for name, sentence in row.reasons if name == SHORTER_IS_BETTER]


def _verdict(report: Report, row: Row) -> str:
    return f"{row.candidate.name}: {row.judgement.verdict.upper()}, {_against_the_bar(report, row)}"


def _against_the_bar(report: Report, row: Row) -> str:
    bounds, bar = row.figures.ratio, report.setup.bar
    more = "it is so near the bar that more prompts would hardly settle it"
    if row.judgement.num_more is not None:
        more = f"about {row.judgement.num_more * report.setup.batch} more prompts would probably settle it"
    if not row.figures.exactness.is_exact:
        return "because it wrote other texts than vanilla."
    if bounds.known is None:
        return f"since {bounds.num_values} batches bound nothing; {more}."
    low, high = bounds.known
    if row.judgement.verdict is ShipVerdict.SHIP:
        return f"at least {low:.2f}x, and the bar is {bar:.2f}x."
    if row.judgement.verdict is ShipVerdict.DO_NOT_SHIP:
        return f"at most {high:.2f}x, and the bar is {bar:.2f}x."
    return f"between {low:.2f}x and {high:.2f}x, the bar of {bar:.2f}x among them; {more}."


def _conclusion(report: Report) -> Iterator[str]:
    if report.shipped is not None:
        rivals = ", ".join(candidate.name for candidate in report.rivals)
        apart = f"; not distinguishable from {rivals}" if rivals else ""
        yield f"Ship {report.shipped.candidate.name}: {_ratio(report.shipped.figures.ratio)} times vanilla{apart}."
    elif any(row.judgement.verdict is ShipVerdict.TOO_CLOSE for row in report.rows):
        yield f"Ship nothing yet: no candidate is sure to reach {report.setup.bar:.2f}x."
    else:
        yield f"Ship none of them: none reaches {report.setup.bar:.2f}x on these prompts."
    if (number := len(report.rows)) > 1:
        yield (
            f"The bounds hold for all {number} candidates at once, with 95 % confidence, so the best may be picked by "
            f"them; the estimate of the one picked is a little flattered."
        )
    for bounds_text in report.notes:
        yield f"Note: {bounds_text}."


def show_targets(report: TargetsReport) -> None:
    """A table of both targets, then the texts that differ."""
    console = out()
    for name, one in zip("AB", report.targets, strict=True):
        identity = one.identity
        console.print(f"{name}: {one.source}, revision {identity.target_revision}, {identity.engine}", soft_wrap=True)
    console.print(f"{report.num_prompts} prompts, batch {report.batch}, on {report.targets[0].identity.device}")
    if report.num_turns < report.num_turns_planned:
        console.print(f"INTERRUPTED: {report.num_turns} of {report.num_turns_planned} batches were measured")
    console.print()
    made = table("target", *(columns := ["tokens/s", "tokens a text"]), "x A [95 %]", "median [95 %]", right=columns)
    ratios = ("", ""), (_ratio(report.ratio), _ratio(report.median))
    for name, one, cells in zip("AB", report.targets, ratios, strict=True):
        made.add_row(name, rate(one.tokens_per_s), f"{one.output_tokens:.0f}", *cells)
    console.print(made)
    console.print()
    num_differing, num_compared = len(report.differences), report.num_compared
    if not num_compared:
        console.print("Texts were drawn without a seed, so there is nothing to compare.")
    else:
        console.print(f"Texts: {num_differing} of {num_compared} differ.")
    for difference in report.differences:
        shared, lengths = difference.num_equal_characters, " and ".join(map(str, difference.num_characters))
        console.print(f"  {difference.where}: equal for {shared} characters, of {lengths}", soft_wrap=True)
    for note in report.notes:
        console.print(Text(textwrap.fill(f"Note: {note}.", console.width)))


def targets_as_json(report: TargetsReport) -> dict[str, Any]:
    """Times in seconds; no prompts and no texts."""
    return dict(to_jsonable_python(report))


def _bytes(number: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= size:
            value = number / size
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{number} B"


def report_as_json(report: Report) -> dict[str, Any]:
    """Times in seconds, sizes in bytes, counts as they were counted."""
    identity = report.setup.identity
    document = {
        "setup": replace(report.setup, identity=replace(identity, device=identity.shown_device)),
        "num_batches": report.num_turns,
        "num_batches_planned": report.num_turns_planned,
        "is_interrupted": report.is_interrupted,
        "vanilla": _figures(report.vanilla),
        "candidates": [_row(row) for row in report.rows],
        "ship": None if report.shipped is None else report.shipped.candidate.name,
        "not_told_apart": [candidate.name for candidate in report.rivals],
        "memory": report.footprint,
        "notes": report.notes,
    }
    return dict(to_jsonable_python(document))


def _row(row: Row) -> dict[str, Any]:
    figures = row.figures
    return {
        **_figures(figures),
        **asdict(row.candidate),
        "verdict": row.judgement.verdict,
        "num_more_batches": row.judgement.num_more,
        "ratio": figures.ratio,
        "median_ratio": figures.median,
        "ratios": figures.ratios,
        "exactness": figures.exactness,
        "costs_in_vanilla_rounds": row.costs,
        "reasons": [{"name": name, "sentence": sentence} for name, sentence in row.reasons],
    }


def _figures(figures: Figures) -> dict[str, Any]:
    seen = figures.acceptance
    return {
        "name": figures.candidate.name,
        "tokens_per_s": figures.tokens_per_s,
        "time_to_first_token_s": figures.first_token_s,
        "time_per_token_s": figures.token_s,
        "response_s": figures.response_s,
        "output_tokens_median": figures.output_tokens,
        "num_texts": seen.num_texts,
        "counts": seen.counts,
        "tokens_per_round": seen.tokens_per_round,
        "proposed_per_round": seen.proposed_per_round,
        "alpha": seen.alpha,
        "alpha_by_position": [seen.alpha_at(i) for i in range(1, len(seen.counts.trials) + 1)],
        "times": figures.times,
    }
