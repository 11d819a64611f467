"""The alerts fire on the metrics of a fault and on no others, by Prometheus's own tool."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.fixtures.missing import missing

ROOT: Final = Path(__file__).resolve().parents[1]
RULES: Final = ROOT / "configs" / "prometheus" / "alerts.yml"
CASES: Final = sorted((ROOT / "tests" / "alerts").glob("*.yml"))


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    found = shutil.which("promtool")
    if found is None:
        missing("promtool", "it comes with Prometheus, as Debian's package `prometheus`")
    return subprocess.run([found, *arguments], capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_alerts_fire_when_they_should_and_else_not(case: Path) -> None:
    tested = promtool("test", "rules", case)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_every_alert_is_seen_firing() -> None:
    def load(path: Path) -> dict[str, Any]:
        return dict(yaml.safe_load(path.read_text(encoding="utf-8")))

    alerts = {rule["alert"] for group in load(RULES)["groups"] for rule in group["rules"]}
    asked = [one for case in CASES for test in load(case)["tests"] for one in test["alert_rule_test"]]
    assert {one["alertname"] for one in asked if one["exp_alerts"]} == alerts
