"""What every test gets: a clean environment, a printed seed, and the real servers as fixtures."""

from __future__ import annotations

import logging
import os
import random
import sys
from collections.abc import Iterator

import hypothesis
import pytest

_FIXTURES = (
    *("worker", "broker", "postgres", "models", "cli", "runs", "history", "console", "object_store", "processes"),
    "openai_api",
)
pytest_plugins = [f"tests.fixtures.{name}" for name in _FIXTURES]

#: The seed of every run that asks for no other.
FIXED_SEED = 20261122

# A property does not fail because the machine is busy. Those that need more examples ask for them.
hypothesis.settings.register_profile("alphaloop", deadline=None, max_examples=50)
hypothesis.settings.load_profile("alphaloop")

# Settings of the person who runs the tests must not change what they test; KAFKA_HOME names where Kafka lies.
for name in list(os.environ):
    if name.startswith("ALPHALOOP_") or name in ("KAFKA_BOOTSTRAP_SERVERS", "DATABASE_URL"):
        del os.environ[name]


# Processes that share two cores would spend their time waiting for each other's computing threads. Tests of many
# threads set their own number.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure() -> None:
    """Draw the seed before other processes start, because they inherit it."""
    _seed()


def pytest_report_header(config: pytest.Config) -> str:
    """The run's seed, so that a failure can be repeated with TEST_SEED."""
    return f"alphaloop seed: {_seed()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes share the files, those with slow tests come first, so that none is left for the end."""
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """What a test configures of logging is undone, because a later test may read the log."""
    root, client = logging.getLogger(), logging.getLogger("alphaloop.kafka.librdkafka")
    handlers, levels, hook = root.handlers[:], (root.level, client.level), sys.excepthook
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    client.setLevel(levels[1])
    sys.excepthook = hook


@pytest.fixture(scope="session")
def seed() -> int:
    """The seed of this run."""
    return _seed()


@pytest.fixture
def rng(seed: int) -> random.Random:
    """A generator seeded with the run's seed."""
    return random.Random(seed)


def _seed() -> int:
    """Fixed, so that a run repeats the one before; TEST_SEED=random draws a new one, TEST_SEED=N repeats that one."""
    asked = os.environ.get("TEST_SEED", str(FIXED_SEED))
    if asked == "random":
        asked = os.environ["TEST_SEED"] = str(random.SystemRandom().randrange(2**31))
    return int(asked)
