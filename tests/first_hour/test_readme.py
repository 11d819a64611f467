"""The README's commands on an empty machine. `make first-hour` walks the guides, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from alphaloop.embedded.install import cache_folder
from tests.first_hour.machine import fresh_checkout, fresh_environment
from tests.first_hour.walk import Walk

#: Of the costs, what no decision can be taken without is measured, and no more.
QUICK = {
    "ALPHALOOP_WORKER__CALIBRATION_BUDGET_S": "0",
}


@pytest.mark.kafka
@pytest.mark.postgres
@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("kafka_home")
def test_the_readme_keeps_its_promises(tmp_path: Path) -> None:
    environment = fresh_environment(tmp_path / "home")
    # The model that this machine has converted before: the walk of `make first-hour` converts it.
    environment["XDG_CACHE_HOME"] = str(cache_folder().parents[1])
    with Walk(fresh_checkout(tmp_path), {**environment, **QUICK}) as walk:
        walk.read("README.md")
        walk.take_down()
        walk.check_first_result()
