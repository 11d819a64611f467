"""The error tree that the docs draw is that of the classes, and each code stands once."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import alphaloop
from alphaloop import errors
from alphaloop.errors import AlphaloopError

#: vLLM imports them, in an environment of its own. They define no error.
INSIDE_VLLM = ("alphaloop.inside_vllm.scheduler", "alphaloop.inside_vllm.worker")
REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "errors.md"
LINE = re.compile(r"^(?P<indent>[│ ]*)(?:[├└]── )?(?P<name>[A-Z]\w+)(?: .*)?$")


def drawn(text: str) -> dict[str, str | None]:
    """The parent of every class of a drawn tree."""
    found: dict[str, str | None] = {}
    above: list[str] = []
    for line in text.splitlines():
        if (match := LINE.match(line)) is not None:
            depth = len(match["indent"]) // 4 + 1 if line.startswith(("│", "├", "└", " ")) else 0
            above = [*above[:depth], match["name"]]
            found[match["name"]] = above[-2] if depth else None
    return found


def every_error() -> list[type[AlphaloopError]]:
    """Every error class of alphaloop, those that a module defines beside what raises them included."""
    for module in pkgutil.walk_packages(alphaloop.__path__, "alphaloop."):
        if not module.name.endswith("__main__") and module.name not in INSIDE_VLLM:
            importlib.import_module(module.name)
    found: list[type[AlphaloopError]] = [AlphaloopError]
    for cls in found:
        found += [child for child in cls.__subclasses__() if child.__module__.startswith("alphaloop.")]
    return found


def test_the_reference_page_shows_every_class_with_its_code() -> None:
    page = REFERENCE.read_text(encoding="utf-8")
    root, *others = every_error()
    parents = {root.__name__: None, **{cls.__name__: cls.__mro__[1].__name__ for cls in others}}
    assert drawn(page.split("```")[1].removeprefix("text\n")) == parents
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", page, re.MULTILINE))
    assert rows == {cls.__name__: cls.code for cls in every_error()}


def test_codes_are_unique() -> None:
    codes = [cls.code for cls in every_error()]
    assert len(codes) == len(set(codes))
    assert all(re.fullmatch(r"[a-z_]+", code) for code in codes)


def test_an_error_without_a_message_says_its_class_line() -> None:
    for cls in every_error():
        assert str(cls()) == (cls.__doc__ or "").splitlines()[0]
        assert str(cls("found 1", hint="make it 2")) == "found 1\nhint: make it 2"


def test_a_message_error_names_its_field() -> None:
    error = errors.InvalidField("expected less", field="body.n", hint="leave it out")
    assert str(error) == "body.n: expected less\nhint: leave it out"
    assert (error.message, error.field, error.code) == ("expected less", "body.n", "invalid_field")


@pytest.mark.parametrize(
    ("module", "extra"), [("torch.nn", "decode"), ("aiohttp", "servers"), ("opentelemetry.sdk", "tracing")]
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(module: str, extra: str) -> None:
    error = errors.package_missing(ModuleNotFoundError(name=module), "models.target")
    assert error.message == f"models.target: needs the package {module.split('.')[0]}, which is not installed"
    assert (error.hint or "").startswith(f"pip install 'alphaloop[{extra}]'")


def test_a_missing_module_of_our_own_is_a_fault() -> None:
    with pytest.raises(ModuleNotFoundError):
        errors.package_missing(ModuleNotFoundError(name="worker.gone"))


def test_a_worker_without_torch_names_the_smaller_build_and_its_page(tmp_path: Path) -> None:
    masked = """if True:
        import sys
        sys.modules["torch"] = None
        from alphaloop.errors import ConfigError
        from alphaloop.settings.models import ModelSettings
        from worker.assembly import open_engine
        try:
            open_engine(ModelSettings(), num_slots=1)
        except ConfigError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", masked], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    message, hint = done.stdout.splitlines()
    assert message == "models.target: needs the package torch, which is not installed"
    place = hint.rpartition(": ")[2]
    assert Path(place).is_absolute()
    assert "whl/cpu" in Path(place).read_text(encoding="utf-8")
