"""`alphaloop capacity` over jobs of a ledger: devices, hours and money for a deadline, and what is not known."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import text

from alphaloop.messages import Mode, Purpose, Status
from alphaloop.messages.result import Failure
from alphaloop.prices import NO_PRICE
from alphaloop.server_identity import SERVERS
from alphaloop.store.arrivals import ArrivalStore
from alphaloop.store.database import Database
from alphaloop.store.job_counts import DecodeRun
from alphaloop.store.outcomes import OutcomeStore
from alphaloop.store.switchback import SwitchbackStore
from tests.fixtures.cli import Cli
from tests.fixtures.runs import (
    DecodedJobs,
    block_rows,
    calibrate,
    claim,
    decode_run,
    outcome,
    record,
    subject,
    vanilla_counts,
)
from tests.integration.test_cli_explain import worker_says

pytestmark = pytest.mark.postgres

FAILURE = Failure(code="decode_failed", message="a step failed", hint="")
NOW = datetime.now(UTC)
#: Three hours ago, in the middle of a minute.
BEGINNING = (NOW - timedelta(hours=3)).replace(second=30, microsecond=0)


def run_of(
    minutes: float, *, wall_s: float = 60.0, load: float = 1.0, queue_s: float = 0.0, mode: Mode = Mode.VANILLA
) -> DecodeRun:
    """A job that came so long after the beginning, of 100 tokens."""
    ends = BEGINNING + timedelta(minutes=minutes, seconds=wall_s + queue_s)
    run = decode_run(vanilla_counts(100), mode=mode, at=ends)
    return replace(run, wall_s=wall_s, device_s=wall_s / load, queue_s=queue_s, batch_size=4, target="small")


def recorded(database: Database, runs: Sequence[DecodeRun]) -> None:
    record(database, *runs, job_ids=[f"job-{number}" for number in range(len(runs))])


def test_arrivals_are_what_the_ledger_says_of_each_job(database: Database) -> None:
    """Decoded later, after a wait: the arrival is the same. Loads, lengths and minutes are not mixed."""
    alike = [run_of(0), run_of(0, wall_s=61.0, queue_s=20.0)]
    others = [run_of(0, load=4.0), run_of(0, wall_s=120.0), run_of(5), run_of(0, load=9.0)]
    of_texts = replace(run_of(9), num_texts=3, device_s=90.0)
    at_a_server = replace(of_texts, device=f"{SERVERS}ab12", device_s=20.0)
    empty = replace(run_of(0), wall_s=0.0)
    probe = replace(run_of(20), purpose=Purpose.PROBE)
    recorded(database, [*alike, *others, of_texts, at_a_server, empty, probe])
    (seen,) = ArrivalStore(database).seen(BEGINNING, NOW)
    assert (seen.target, seen.num_jobs, seen.most_running) == ("small", 9, 4)
    quarter = BEGINNING.replace(minute=BEGINNING.minute // 15 * 15, second=0)
    assert seen.begins_at == quarter
    offset_s = (BEGINNING - quarter).total_seconds()
    found = [
        (group.arrived_s - offset_s, group.num_jobs, group.num_texts, round(group.wall_s, 2), round(group.load, 2))
        for group in seen.groups
    ]
    assert sorted(found) == [
        (0.0, 1, 1, 120.0, 1.0),
        (0.0, 2, 1, 60.0, 4.0),  # a load of nine is that of the four that ran at most
        (0.0, 2, 1, 60.5, 1.0),
        (300.0, 1, 1, 60.0, 1.0),
        (540.0, 1, 1, 60.0, 3.0),
        (540.0, 1, 3, 60.0, 2.0),
        (1200.0, 1, 1, 60.0, 1.0),
    ]
    assert seen.device_s == pytest.approx(60 + 61 + 15 + 120 + 60 + 60 / 9 + 90 + 20 + 60)
    assert ArrivalStore(database).seen(NOW - timedelta(minutes=1), NOW) == []


def test_a_fleet_for_a_deadline_its_hours_and_its_cost(cli: Cli, cli_environment: None, database: Database) -> None:
    """Forty jobs of a minute come at once; four run on a device, and a round of four takes as long as one of one."""
    slow = [run_of(60, load=4.0) for _ in range(40)]
    recorded(database, [*(run_of(minutes) for minutes in range(10)), *slow])
    of_five, of_long = (
        cli("capacity", "--deadline", deadline, "--price", "2", "--json").json for deadline in ("5m", "2h")
    )
    (target,) = of_five["targets"]
    now, vanilla = target["plans"]
    # Ten waves of four, a minute each: two devices take five minutes.
    assert (now["name"], now["num_devices"], now["slowest_s"]) == ("as now", 2, pytest.approx(300, abs=1))
    assert now["busy_h"] == pytest.approx((10 + 10) / 60, abs=0.01)
    assert now["on_h"] == pytest.approx(2 * target["span_s"] / 3600)
    assert (now["on_cost"], now["busy_cost"]) == pytest.approx((2 * now["on_h"], 2 * now["busy_h"]))
    assert vanilla == {**now, "name": "vanilla", "num_devices_low": 2, "num_devices_high": 2}
    assert of_long["targets"][0]["plans"][0]["num_devices"] == 1
    begins_at = datetime.fromisoformat(target["busiest"]["begins_at"])
    assert abs(begins_at - BEGINNING - timedelta(hours=1)) < timedelta(minutes=1)
    assert target["busiest"]["num_devices"] == pytest.approx(2, abs=0.02)
    assert cli("capacity", "--deadline", "30s", "--json").json["targets"][0]["num_too_long"] == 50


def test_more_devices_than_partitions_are_named(
    cli: Cli, cli_environment: None, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(database, [run_of(60, load=4.0) for _ in range(40)])
    for num_partitions, is_short in ((1, True), (2, False)):
        monkeypatch.setenv("ALPHALOOP_KAFKA__NUM_PARTITIONS", str(num_partitions))
        limits = cli("capacity", "--deadline", "5m", "--json").json["limits"]
        assert any("2 devices need at least 2 partitions" in limit for limit in limits) == is_short
        assert ("2 devices need" in " ".join(cli("capacity", "--deadline", "5m").out.split())) == is_short


def test_vanilla_takes_as_much_longer_as_was_measured(cli: Cli, cli_environment: None, database: Database) -> None:
    recorded(database, [run_of(minutes, mode=Mode.SPECULATIVE) for minutes in range(60)])
    (target,) = cli("capacity", "--deadline", "1h", "--json").json["targets"]
    unknown = target["plans"][1]
    assert (unknown["num_devices"], unknown["on_h"]) == (None, None)
    assert unknown["unknown_because"] == "no speed-up was measured in the last day for code"
    slices = SwitchbackStore(database)
    slices.add(block_rows(subject("code"), NOW - timedelta(minutes=5), 12))
    slices.refresh(NOW)
    speedup = slices.shown(datetime.now(UTC))["code"].speedup
    assert speedup is not None
    assert speedup.mean > 1.5
    (target,) = cli("capacity", "--deadline", "1h", "--json").json["targets"]
    now, vanilla = target["plans"]
    assert vanilla["unknown_because"] is None
    # At loads that were never seen a device gains nothing: it is busy for the work of all, however many run.
    assert now["busy_h"] == pytest.approx(1.0, abs=0.01)
    assert vanilla["busy_h"] == pytest.approx(now["busy_h"] * speedup.mean, rel=1e-3)
    assert vanilla["num_devices_low"] <= vanilla["num_devices"] <= vanilla["num_devices_high"]


def test_a_drafter_is_planned_by_what_decisions_expect_of_it(
    cli: Cli, cli_environment: None, twelve_jobs: Database
) -> None:
    """Speculated jobs without a measured speed-up leave its plan unknown; vanilla ones rest on the expectation."""
    worker_says(twelve_jobs)
    since = ("capacity", "--deadline", "1m", "--drafter", "lookup", "--json")
    plan = cli(*since).json["targets"][0]["plans"][2]
    assert (plan["name"], plan["is_expected"], plan["num_devices"]) == ("with lookup", True, None)
    assert plan["unknown_because"] == "no speed-up was measured in the last day for code"
    slices = SwitchbackStore(twelve_jobs)
    slices.add(block_rows(subject("code"), NOW - timedelta(minutes=5), 12))
    slices.refresh(NOW)
    as_now, vanilla, plan = cli(*since).json["targets"][0]["plans"]
    assert plan["busy_h"] < vanilla["busy_h"]
    assert plan["num_devices_low"] <= plan["num_devices"] <= plan["num_devices_high"]
    assert (as_now["is_expected"], vanilla["is_expected"]) == (False, False)
    shown = cli("capacity", "--deadline", "1m", "--drafter", "lookup").out
    assert "with lookup (expected)" in shown
    other = cli("capacity", "--deadline", "1m", "--drafter", "nosuch")
    assert (other.code, "one of" in other.err) == (1, True)


def test_a_screen_of_80_columns_says_what_is_not_known(
    cli: Cli, cli_environment: None, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    calibrate(database)
    other = replace(run_of(3, load=3.0), device="another", target="\x1b[31mred")
    recorded(database, [run_of(1, mode=Mode.SPECULATIVE), replace(run_of(2), device="another"), other])
    for status in (Status.EXPIRED, Status.FAILED):
        claim(database, status)
        OutcomeStore(database).record([outcome(status, status=status, error=FAILURE)], owner="w")
    ran = cli("capacity", "--deadline", "4h")
    assert NO_PRICE in ran.err
    assert max(map(len, ran.out.splitlines())) <= 80
    said = " ".join(ran.out.split())
    for words in (
        "small: 2 jobs in",
        "vanilla: not known, because no speed-up was measured in the last day for code.",
        "No device decoded more than 4 sequences at once",
        "A device is the mean of these: another, cpu-2-threads.",
        "Only 3 h were seen",
        "None had fewer than 3.0:",
        "\\x1b[31mred: 1 job in",
        "jobs that still wait in Kafka are not in them",
        "2 jobs failed, expired or were cancelled: what they took is not in it.",
    ):
        assert words in said, words
    assert "EUR" not in cli("capacity", "--deadline", "4h").out
    monkeypatch.setenv("ALPHALOOP_PRICES__CURRENCY", "EUR")
    priced = cli("capacity", "--deadline", "4h", "--price", "12345.67").out
    assert priced.count("EUR") >= 4
    assert max(map(len, priced.splitlines())) <= 80


def test_a_picture_shows_the_figures_of_the_terminal(
    cli: Cli, cli_environment: None, database: Database, tmp_path: Path
) -> None:
    """A panel for each target, with its names escaped; work, fleets and the busiest window as in the JSON."""
    hostile = replace(run_of(3), target="<script>alert(1)</script>\x1b[31m")
    recorded(
        database, [*(run_of(minutes) for minutes in range(10)), *(run_of(60, load=4.0) for _ in range(40)), hostile]
    )
    page = tmp_path / "fleets.html"
    asked = ("capacity", "--deadline", "5m")
    assert page.as_uri() in cli(*asked, "--picture", str(page)).err
    drawn = page.read_text()
    assert drawn.count("<svg") == drawn.count("full devices</text>") == 2
    assert "<script" not in drawn
    assert "http" not in drawn
    targets = cli(*asked, "--json").json["targets"]
    shown = cli(*asked).out
    for target in targets:
        assert target["arrived"]["device_s"][-1] > 0, "it ends with the last arrival"
        assert f"busiest 5 min: {target['busiest']['num_devices']:.2f}</text>" in drawn
    small = next(target for target in targets if target["target"] == "small")
    work_s = sum(small["arrived"]["device_s"])
    assert work_s == pytest.approx((10 * 60 + 40 * 60) / 4, rel=0.01), "of full devices: four run in the time of one"
    for text_of_both in (
        "small: 50 jobs in",
        f"{small['busiest']['num_devices']:.2f} full devices",
        "No device decoded",
    ):
        assert text_of_both in " ".join(shown.split())
        assert text_of_both in drawn
    assert "as now, vanilla: 2</text>" in drawn
    assert cli(*asked, "--picture", "-").out.rstrip().endswith("</html>")
    assert cli(*asked, "--picture", str(tmp_path / "none" / "page.html")).code == 1
    assert cli(*asked, "--picture", "-", "--json").code == 2


def test_times_and_options_that_cannot_be(cli: Cli, cli_environment: None, database: Database) -> None:
    assert "no job was decoded from" in cli("capacity", "--deadline", "4h").err
    assert cli("capacity", "--deadline", "4h", "--json").json["targets"] == []
    assert cli("capacity").code == 2
    assert cli("capacity", "--deadline", "soon").code == 1
    assert cli("capacity", "--deadline", "4h", "--price", "-1").code == 2
    assert cli("capacity", "--deadline", "4h", "--since", "1h", "--until", "2h").code == 2


def test_a_drafter_that_would_slow_a_task_down_leaves_it_vanilla(
    cli: Cli, cli_environment: None, twelve_jobs: Database, rng: random.Random
) -> None:
    jobs = DecodedJobs(twelve_jobs, rng, num_written=100)
    for number in range(40):
        jobs.decoded("prose", 0.001, 1, device_s=2.0, at=NOW - timedelta(minutes=number))
    worker_says(twelve_jobs)
    weighed = cli("explain", "prose", "--json").json["decision"]["alternatives"]
    assert max(option["speedup"] for option in weighed if option["drafter"]) < 1
    slices = SwitchbackStore(twelve_jobs)
    for task in ("code", "prose"):
        slices.add(block_rows(subject(task), NOW - timedelta(minutes=5), 12))
    slices.refresh(NOW)
    twelve_jobs.change(text("DELETE FROM decode_runs WHERE task = 'code'"))
    (target,) = cli("capacity", "--deadline", "1h", "--drafter", "lookup", "--json").json["targets"]
    _, vanilla, drafted = target["plans"]
    assert (drafted["num_devices"], drafted["busy_h"]) == (vanilla["num_devices"], pytest.approx(vanilla["busy_h"]))
