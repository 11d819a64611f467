"""JSON that Python's json module would not write, and the values that break careless readers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final


@dataclass(frozen=True)
class Raw:
    """Text that stands in the JSON as it is."""

    text: str


@dataclass(frozen=True)
class Pairs:
    """An object that may have a name twice."""

    pairs: tuple[tuple[str, Any], ...]


def write(value: Any, *, is_ascii: bool = True) -> str:
    """JSON of dicts, lists, scalars, Raw and Pairs; with escapes for what is not ASCII, or without."""
    inner = partial(write, is_ascii=is_ascii)
    match value:
        case Raw():
            return value.text
        case Pairs():
            return (
                "{"
                + ",".join(f"{json.dumps(name, ensure_ascii=is_ascii)}:{inner(item)}" for name, item in value.pairs)
                + "}"
            )
        case dict():
            return inner(Pairs(tuple(value.items())))
        case list() | tuple():
            return "[" + ",".join(map(inner, value)) + "]"
        case _:
            return json.dumps(value, ensure_ascii=is_ascii)


NUMBERS: Final = (
    *("0", "-0", "0.0", "1", "-1", "2", "64", "65", "200", "201"),
    *("1e400", "-1e400", "1e-400", "1e308", "1e-308", "5e-324", "0.1e1", "1E+2", "1e18", "1e19", "100.0"),
    *("NaN", "Infinity", "-Infinity", "nan", "1.", ".5", "01", "+1", "0x10", "1_000"),
    *("2147483648", "9007199254740993", "9223372036854775807", "9223372036854775808", "-9223372036854775809"),
    *("18446744073709551616", "1.0000000000000000000000001"),
)
NUMBERS_TOO_LONG: Final = (
    "9" * 4300,
    "9" * 4301,
    "-" + "1" * 5000,
    "1" + "0" * 400,
    "0." + "1" * 5000,
    "1e" + "9" * 50,
)
STRINGS: Final = (
    "",
    " ",
    "\t\n",
    "\u0000",
    "a\u0000b",
    "\x7f",
    "\u0085",
    "\u2028",
    "\ud800",
    "\udfff",
    "\udc00\ud800",
    "x\ud83d",
    "\ufeff",
    "\ue0000\ue000",
    "😀" * 50,
    "e\u0301" * 50,
    "\u202eabc",
    "<eos>",
    "<user><answer><eos>",
    "{{ 7 * 7 }}",
    "{% for x in y %}",
    "'; DROP TABLE jobs; --",
    "%s%n{0}{}",
    "../../etc/passwd",
    "true",
    "null",
    "0",
    "1e400",
    "NaN",
    "2026-12-01T09:00:00Z",
    "0001-01-01T00:00:00+14:00",
    "9999-12-31T23:59:59-14:00",
    "2026-12-01T09:00:00",
    "2026-02-30T00:00:00Z",
    "2026-12-01T09:00:00+99:99",
    "-1-1",
    "1" * 201,
    "job id",
    "jób",
    "code",
    "sql",
    "Code",
    "probe",
    "control",
    "traffic",
    "speculative",
    "lookup",
    "system",
    "user",
    "assistant",
    "tool",
    "developer",
    "__class__",
    "__proto__",
)


def any_value(chance: random.Random) -> Any:
    """A hostile value of any kind."""
    return chance.choice(_KINDS)(chance)


def _nested(chance: random.Random) -> Raw:
    depth = chance.choice([2, 30, 31, 32, 33, 100, 2000, 100_000])
    opening, closing = chance.choice([("[", "]"), ('{"a":', "}")])
    return Raw(opening * depth + ("1" if opening != "[" else "") + closing * chance.choice([depth, depth, depth - 1]))


def _long(chance: random.Random) -> str:
    unit = chance.choice(["x", " ", "word ", "😀", "\n", "<eos>", "\u0000", "\ud800"])
    return unit * chance.choice([101, 201, 257, 5_000, 100_000])


def _many(chance: random.Random) -> Any:
    size = chance.choice([5, 65, 1001, 1025])
    if chance.random() < 0.5:
        return [any_scalar(chance) for _ in range(size)]
    return {str(number): any_scalar(chance) for number in range(size)}


def any_scalar(chance: random.Random) -> Any:
    """A hostile value that is neither an array nor an object."""
    return chance.choice([_number, _string, _constant])(chance)


def _number(chance: random.Random) -> Raw:
    return Raw(chance.choice(NUMBERS if chance.random() < 0.9 else NUMBERS_TOO_LONG))


def _string(chance: random.Random) -> Any:
    if chance.random() < 0.1:
        return Raw(chance.choice(['"\\u12"', '"\\x41"', '"\n"', '"', "'a'", '"\\ud800\\u0041"', '"a" "b"']))
    return chance.choice(STRINGS)


def _constant(chance: random.Random) -> Any:
    return chance.choice([None, True, False, Raw("True"), Raw("None"), Raw("undefined")])


def _small(chance: random.Random) -> Any:
    return chance.choice([[], {}, [[]], [None], [{}], {"": None}, {"content": "x"}, [{"role": "user"}], ["a"], [0.5]])


_KINDS: Final[tuple[Callable[[random.Random], Any], ...]] = (
    *(_number, _number, _string, _string, _constant, _small, _small),
    *(_nested, _long, _many),
)
