"""Who opens refreshes: a person with `alphaloop draft refresh`, and a run of the scheduler; and what screens show."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from alphaloop.deciding.goodput import DrafterState
from alphaloop.draft_card import DraftJudgement, MeasuredDraft
from alphaloop.settings import RefreshSettings, Settings, TaskSettings
from alphaloop.settings.models import HeadsDrafterSettings, ModelSettings
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import DraftRegistry, DraftStatus
from alphaloop.store.refreshes import RefreshReason, RefreshState, RefreshStore
from alphaloop.store.reports import ReportStore
from alphaloop.store.workers import WorkerLoad, WorkerStore
from tests.fixtures.cli import Cli
from tests.fixtures.deciding import SETUP
from tests.fixtures.drift import scheduler_of

pytestmark = pytest.mark.postgres

NOW = datetime.now(UTC).replace(microsecond=0)
FIGURES = {"total": {"num_texts": 9, "parent": 1.41, "candidate": 1.78, "ratio": 1.26, "low": 1.1, "high": 1.42}}

_MEASURED = MeasuredDraft(
    num_texts=9,
    num_tokens=210,
    rounds=100,
    proposed=(100,),
    trials=(100,),
    accepts=(60,),
    num_positions=100,
    overlap_sum=50.0,
)
JUDGED = DraftJudgement(
    num_draft_tokens=4,
    by_task={},
    total=_MEASURED,
    untrained=_MEASURED,
    target_pass_ms=10.0,
    draft_pass_ms=1.0,
)


def serve(database: Database, trained_for: str = "target-0") -> None:
    """A worker serves target-1 with these heads."""
    heads = DrafterState("heads", "h1", 4, trained_for=trained_for)
    setup = replace(SETUP, drafters=(heads,))
    DraftRegistry(database).register("heads", "h1", "target-1", trained_for=trained_for)
    WorkerStore(database).say(WorkerLoad("w", "cpu", "a-target", 1, 0, 0, {}, setup=setup))


def settings(folder: Path, **refresh: Any) -> Settings:
    models = ModelSettings(drafters={"heads": HeadsDrafterSettings(source="drafts/heads")})
    dials = RefreshSettings(**{"automatic": True, **refresh})
    return Settings(data_dir=folder, tasks={"code": TaskSettings()}, models=models, refresh=dials)


class TestTheScheduler:
    def test_it_opens_one_for_a_new_target_and_says_so(self, database: Database, tmp_path: Path) -> None:
        serve(database)
        scheduler = scheduler_of(database, settings(tmp_path))
        scheduler.run_once(NOW)
        (opened,) = RefreshStore(database).of("heads")
        assert (opened.reason, opened.state) == (RefreshReason.NEW_TARGET, RefreshState.WAITING)
        assert (opened.target_revision, opened.parent_draft_revision) == ("target-1", "h1")
        report = ReportStore(database).latest()
        assert report is not None
        assert "heads for target target-1: waiting, new target" in " ".join(report.text.split())
        assert "Drafts trained anew" in report.html
        scheduler.run_once(NOW + timedelta(hours=1))
        assert len(RefreshStore(database).of("heads")) == 1

    def test_it_opens_one_for_a_stale_draft(self, database: Database, tmp_path: Path) -> None:
        serve(database, trained_for="target-1")
        DraftRegistry(database).set_status("heads", "h1", "target-1", DraftStatus.STALE, "α₁ fell")
        scheduler_of(database, settings(tmp_path)).run_once(NOW)
        (opened,) = RefreshStore(database).of("heads")
        assert opened.reason is RefreshReason.DRAFT_STALE

    def test_it_opens_none_unless_it_is_told_to(self, database: Database, tmp_path: Path) -> None:
        serve(database)
        scheduler_of(database, settings(tmp_path, automatic=False)).run_once(NOW)
        assert RefreshStore(database).all() == []

    def test_it_opens_none_beyond_the_seconds_of_a_day(self, database: Database, tmp_path: Path) -> None:
        serve(database)
        store = RefreshStore(database)
        store.open("other", "target-1", "o1", RefreshReason.BY_HAND, NOW - timedelta(hours=1))
        busy = store.lease("trainer", NOW - timedelta(hours=1), 60)
        assert busy is not None
        store.renew(busy.id, 1, "trainer", NOW - timedelta(minutes=50), 60)
        scheduler = scheduler_of(database, settings(tmp_path, max_device_s_a_day=600))
        scheduler.run_once(NOW)
        assert store.of("heads") == []
        store.end(busy.id, 1, RefreshState.REJECTED, sentence="")
        database.change(text("UPDATE refreshes SET changed_at = changed_at - interval '26 hours'"))
        scheduler.run_once(NOW + timedelta(hours=1))
        assert len(store.of("heads")) == 1


class TestTheCommand:
    @pytest.fixture(autouse=True)
    def _configs(self, cli_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ALPHALOOP_MODELS__DRAFTERS", '{"heads": {"method": "heads", "source": "drafts/heads"}}')

    def test_a_refresh_is_opened_shown_and_cancelled(self, cli: Cli, database: Database) -> None:
        nothing = cli("draft", "refresh", "heads")
        assert (nothing.code, "expected a worker that drafts with heads, found none" in nothing.err) == (1, True)
        serve(database)
        (line,) = cli("draft", "refresh", "heads", "--json").json
        assert (line["state"], line["reason"], line["target_revision"]) == ("waiting", "by_hand", "target-1")
        twice = cli("draft", "refresh", "heads")
        assert (twice.code, "found one" in twice.err, "--cancel" in twice.err) == (1, True, True)
        assert "cancelled" in cli("draft", "refresh", "heads", "--cancel").out
        assert [r.state for r in RefreshStore(database).of("heads")] == [RefreshState.CANCELLED]
        assert "no refresh of heads is open" in cli("draft", "refresh", "heads", "--cancel").err

    def test_only_heads_are_trained(self, cli: Cli, database: Database) -> None:
        refused = cli("draft", "refresh", "lookup")
        assert (refused.code, "one of heads, found 'lookup'" in refused.err) == (1, True)

    def test_what_no_trainer_takes_says_so(self, cli: Cli, database: Database) -> None:
        serve(database)
        cli("draft", "refresh", "heads")
        (line,) = cli("draft", "refresh", "heads", "--status", "--json").json
        assert line["sentence"] == ""
        database.change(text("UPDATE refreshes SET changed_at = changed_at - interval '2 minutes'"))
        (line,) = cli("draft", "refresh", "heads", "--status", "--json").json
        assert line["sentence"] == "no trainer is alive: start `alphaloop trainer`"

    def test_a_refresh_shows_figures_before_stale_and_after(self, cli: Cli, database: Database) -> None:
        facts = {"trained_on": "99 texts", "figures": JUDGED.model_dump(mode="json")}
        DraftRegistry(database).register_trained("heads", "h1", "target-0", **facts)
        serve(database)
        cli("draft", "refresh", "heads")
        store = RefreshStore(database)
        refresh = store.lease("trainer", NOW + timedelta(seconds=1), 60)
        assert refresh is not None
        store.trial(
            refresh.id, 1, name="heads-2", revision="h2", location="file:///d", figures=FIGURES, sentence="on trial"
        )
        (line,) = cli("draft", "refresh", "heads", "--status", "--json").json
        assert (line["before"], line["stale"], line["after"]) == (2.1, 1.41, 1.78)
        assert line["candidate_name"] == "heads-2"
        shown = " ".join(cli("draft", "refresh", "heads", "--status").out.split())
        assert "1.41" in shown
        assert "1.26×" in shown

    def test_the_list_of_drafts_says_what_each_was_trained_for(self, cli: Cli, database: Database) -> None:
        serve(database)
        assert cli("draft", "list", "--json").json[0]["trained_for"] == "target-0"
        assert "target-0" in cli("draft", "list").out
