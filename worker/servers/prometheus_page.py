"""A page of metrics in Prometheus' form, as far as a few names of it are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families

from alphaloop.errors import ReplyInvalid


def values(page: str, names: Sequence[str], *, by: str = "", hint: str) -> Mapping[str, Mapping[str, int]]:
    """Values by name and by the label `by`, summed over all other labels, such as a server's engines.

    Other metrics are not parsed: they are many. Raises ReplyInvalid, with the hint, where the page lacks a name.
    """
    # A name is followed by labels or a value; others may begin alike.
    heads = tuple(f"{name}{mark}" for name in names for mark in "{ ")
    lines = [line for line in page.splitlines() if line.startswith(heads)]
    found: dict[str, dict[str, int]] = {}
    try:
        for family in text_string_to_metric_families("\n".join([*lines, ""])):
            for sample in family.samples:
                its, label = found.setdefault(sample.name, {}), sample.labels.get(by, "")
                its[label] = its.get(label, 0) + int(sample.value)
    except (ValueError, OverflowError):
        raise ReplyInvalid("expected a page of metrics in Prometheus' form, found another") from None
    for name in names:
        if name not in found:
            raise ReplyInvalid(f"expected {name} on the page of metrics, found none", hint=hint)
    return found
