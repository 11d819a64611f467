"""Debian's kcat and the fallback broker: `alphaloop up`, `alphaloop env` and the guides say that it fails."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from alphaloop.embedded.stack import FALLBACK_NOTICE
from tests.fixtures.missing import missing


def test_what_is_said_of_kcat_and_the_fallback_broker_is_so(tansu_broker: str) -> None:
    kcat = shutil.which("kcat")
    if kcat is None:
        missing("kcat", "apt-get install kcat")
    version = subprocess.run([kcat, "-V"], capture_output=True, text=True, check=True, timeout=60)
    if "librdkafka 2.0.2" not in version.stdout + version.stderr:
        pytest.skip("another kcat than Debian's")
    asked = subprocess.run([kcat, "-L", "-b", tansu_broker], capture_output=True, text=True, timeout=60)
    assert asked.returncode != 0, "it works now: take the sentences back"
    assert "Read underflow" in asked.stderr
    assert "Debian's kcat cannot talk to it" in FALLBACK_NOTICE
