"""`python -m worker.decoding.pairing.check_pair TARGET DRAFT`, for `alphaloop check-pair`. 0: fits, 1: refused."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Final, get_args

from alphaloop.cli.screen import note, out, print_json, show_error, table
from alphaloop.errors import AlphaloopError
from alphaloop.settings.models import Dtype
from worker.decoding.device import find_device
from worker.decoding.memory import available_bytes
from worker.decoding.pairing.facts import facts_of
from worker.decoding.pairing.pair import Finding, check_pair

STYLES: Final = {"ok": "green", "warning": "yellow", "refused": "bold red"}


def main(argv: Sequence[str] | None = None) -> int:
    """Read both models' facts, print every finding."""
    options = _options(argv)
    try:
        findings = _check(options)
    except AlphaloopError as error:
        show_error(error)
        return 1
    is_refused = any(finding.verdict == "refused" for finding in findings)
    if options.json:
        found = [dataclasses.asdict(finding) for finding in findings]
        print_json({"target": options.target, "draft": options.draft, "fits": not is_refused, "findings": found})
    else:
        _show(findings)
        note("the draft is refused" if is_refused else "the draft can serve")
    return 1 if is_refused else 0


def _check(options: argparse.Namespace) -> tuple[Finding, ...]:
    target = facts_of(options.target, dtype=options.dtype, context_length=options.context_length)
    draft = facts_of(options.draft, dtype=options.draft_dtype or options.dtype, context_length=target.context_length)
    return check_pair(
        target,
        draft,
        num_slots=options.batch_size,
        max_draft_tokens=options.max_draft_tokens,
        available_bytes=available_bytes(find_device(options.device)),
    )


def _show(findings: Sequence[Finding]) -> None:
    shown = table("check", "verdict", "found")
    for finding in findings:
        style = STYLES[finding.verdict]
        shown.add_row(finding.check, f"[{style}]{finding.verdict}[/]", finding.sentence.replace("[", r"\["))
    out().print(shown)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m worker.decoding.pairing.check_pair", description=__doc__)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--dtype", choices=get_args(Dtype), required=True)
    parser.add_argument("--draft-dtype", choices=get_args(Dtype))
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--max-draft-tokens", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
