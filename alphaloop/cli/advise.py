"""`alphaloop advise`: draft lengths by batch size for a vLLM server."""

from __future__ import annotations

from datetime import UTC, datetime

import typer

from alphaloop.cli.options import AS_JSON, connected_settings, example, open_database
from alphaloop.cli.screen import out, paragraph, print_json, table
from alphaloop.explaining.advising import advise as advice_for


@example("""\
alphaloop advise main
alphaloop advise main --json""")
def advise(
    context: typer.Context,
    endpoint: str = typer.Argument(help="Name of a vLLM server in configs/models.toml; vllm for a worker's own."),
    as_json: bool = AS_JSON,
) -> None:
    """Show with which draft length a vLLM server should draft at each batch size, as measurements say.

    For vLLM's num_speculative_tokens_per_batch_size. Speed-ups are expected ones over vanilla, with 95 % bounds, at the
    least and the greatest batch size of each range.
    """
    settings, now = connected_settings(context, broker=False), datetime.now(UTC)
    with open_database(settings) as database:
        advice = advice_for(database, settings, endpoint, now)
    if as_json:
        print_json(advice.as_json())
        return
    paragraph(advice.sentence)
    if not advice.ranges:
        return
    columns = ("batch size", "k", "at its least", "at its greatest")
    shown = table(*columns, right=columns[1:])
    for row in advice.rows:
        shown.add_row(*row)
    out().print(shown)
    for sentence in advice.notes:
        paragraph(sentence)
    if advice.option is None:
        paragraph("Start it without --speculative-config.")
    else:
        out().print(advice.option, markup=False, soft_wrap=True)
