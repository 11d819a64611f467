"""A candidate of a real worker, from its trial to its end: fetched, loaded beside its parent, compared with it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from sqlalchemy import text

from alphaloop.deciding.decision import DraftSetting
from alphaloop.engine import Engine
from alphaloop.settings import ModelSettings, Settings
from alphaloop.settings.models import HeadsDrafterSettings, HybridDrafterSettings, LookupDrafterSettings, TargetSettings
from alphaloop.store.database import Database, DatabaseClock
from alphaloop.store.decision_inputs import DraftRegistry, DraftStatus
from alphaloop.store.refreshes import Refresh, RefreshReason, RefreshState, RefreshStore
from alphaloop.store.workers import WorkerStore
from engine.models import find_weights
from tests.fixtures.drift import scheduler_of
from tests.fixtures.heads import noise, sequential
from tests.fixtures.worker import Client, changed, running_worker, until
from worker.assembly import open_engine
from worker.training.keep import KeptDrafts

pytestmark = [pytest.mark.postgres, pytest.mark.kafka]

HIDDEN: Final = 64
NUM_TOKENS: Final = 384


@pytest.fixture
def target(trainable_target: Path) -> Path:
    return trainable_target


@pytest.fixture
def settings(worker_settings: Settings, target: Path, tmp_path: Path) -> Settings:
    parent = sequential(tmp_path / "parent", noise(NUM_TOKENS, HIDDEN), target_revision="another")
    models = ModelSettings(
        target=TargetSettings(name="tiny", source=str(target), dtype="float32", device="cpu"),
        drafters={
            "heads": HeadsDrafterSettings(source=str(parent), max_draft_tokens=2),
            "lookup": LookupDrafterSettings(max_draft_tokens=2),
            "both": HybridDrafterSettings(sources=("lookup", "heads"), max_draft_tokens=2, most_tokens={"heads": 1}),
        },
    )
    settings = worker_settings.model_copy(update={"models": models, "data_dir": tmp_path / "data"})
    return changed(settings, worker={"calibration_budget_s": 0.0}, policy={"control_share": 0.5})


@dataclass(frozen=True)
class Trial:
    """A refresh of `heads` whose candidate is kept and on trial."""

    store: RefreshStore
    refresh: Refresh
    folder: Path  #: of the kept files

    def now(self) -> Refresh:
        return self.store.of("heads")[0]


@pytest.fixture
def on_trial(settings: Settings, database: Database, target: Path, tmp_path: Path) -> Trial:
    out = sequential(tmp_path / "candidate", noise(NUM_TOKENS, HIDDEN, seed=5), target_revision=revision(target))
    store, served = RefreshStore(database), find_weights(str(out)).revision
    parent = find_weights(settings.models.drafters["heads"].source).revision  # type: ignore[union-attr]
    now = DatabaseClock(database).measure()
    store.open("heads", revision(target), parent, RefreshReason.BY_HAND, now)
    taken = store.lease("trainer", now, 30.0)
    assert taken is not None
    location = KeptDrafts(settings).keep(out, served)
    of_candidate = {"trained_on": "10 texts", "figures": None, "parent_revision": parent}
    DraftRegistry(database).register_trained("heads-2", served, revision(target), **of_candidate)
    figures: dict[str, Any] = {}
    facts = {"name": "heads-2", "revision": served, "location": location, "figures": figures}
    assert store.trial(taken.id, taken.attempt, **facts, sentence="better in code")
    return Trial(store, store.of("heads")[0], settings.data_dir / "drafts" / served)


def revision(target: Path) -> str:
    return find_weights(str(target)).revision


@contextmanager
def engine_of(settings: Settings) -> Iterator[Engine]:
    with closing(open_engine(settings.models, num_slots=4)) as engine:
        yield engine


def names(engine: Engine) -> set[str]:
    return {drafter.name for drafter in engine.drafters}


def send(client: Client, num: int, first: int = 0) -> None:
    bodies = [{"prompt": f"one two three {n % 7} one two", "max_tokens": 96, "ignore_eos": True} for n in range(num)]
    lines = [{"job_id": f"job-{first + n}", "task": "code", "body": body} for n, body in enumerate(bodies)]
    client.send("code", [json.dumps(line).encode() for line in lines])


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.candidates.LOOK_S", 0.2)


def force(monkeypatch: pytest.MonkeyPatch, drafter: Callable[[], str]) -> None:
    """Every job that is free drafts two tokens with that drafter."""
    monkeypatch.setattr(
        "worker.steering.LengthsTogether.settings",
        lambda self, running, now: [DraftSetting(drafter(), 2) for _ in running],
    )
    monkeypatch.setattr("worker.steering._is_free", lambda lane, decision: True)


def test_a_candidate_drafts_beside_its_parent_in_ten_seconds_and_is_compared_with_it(
    settings: Settings, database: Database, on_trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(settings)
    with engine_of(settings) as engine:
        force(monkeypatch, lambda: "heads-2" if "heads-2" in names(engine) else "heads")
        with running_worker(settings, engine) as worker:
            until(lambda: names(engine) >= {"heads-2", "both-2"}, "the candidate is loaded", 10.0)
            registry = DraftRegistry(database)
            until(
                lambda: {d.drafter: d.status for d in registry.all()}.get("heads-2") is DraftStatus.ACTIVE,
                "it is registered",
            )
            (known,) = (draft for draft in registry.all() if draft.drafter == "heads-2")
            assert (known.draft_revision, known.trained_for) == (
                on_trial.refresh.candidate_revision,
                revision(target_of(settings)),
            )
            assert set(worker.worker.candidates.rivals()) == {"heads", "heads-2", "both", "both-2"}
            costs = worker.worker.deciding.costs.table
            for width in (2, 3):
                parent, candidate = (costs.part_ms(name, 2, width, 64) for name in ("heads", "heads-2"))
                assert parent == candidate != None  # noqa: E711 - both are known
            send(client, 120)
            results = {result.job_id: result for result in client.results(120)}
        assert Counter(result.status for result in results.values()) == {"succeeded": 120}
        texts: dict[str, set[str | None]] = {}
        for job_id, result in results.items():
            texts.setdefault(str(int(job_id.removeprefix("job-")) % 7), set()).add(result.text)
        assert {len(found) for found in texts.values()} == {1}, "whoever drafts, a prompt has one text"
    compared = text(
        "SELECT against, phase, num_proposed > 0 AS drafts FROM switchback_slices WHERE drafter = 'heads-2'"
    )
    arms = {tuple(row) for row in database.rows(compared)}
    assert {("heads", "control", True), ("", "control", False), ("heads", "before", True)} <= arms
    points = text("SELECT count(*) FROM cost_profiles WHERE drafter = 'heads-2'")
    assert database.scalar(points) == database.scalar(
        text("SELECT count(*) FROM cost_profiles WHERE drafter = 'heads'")
    )


def target_of(settings: Settings) -> Path:
    return Path(settings.models.target.source)


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize("uses_it", [True, False])
def test_a_decided_trial_ends_and_workers_follow(
    settings: Settings, database: Database, on_trial: Trial, uses_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.refreshing.MOST_JOBS", 8)
    choice = {"code": None if not uses_it else "heads-2"}
    monkeypatch.setattr("scheduler.loop.ended_trials", with_choices(choice))
    client = Client(settings)
    with engine_of(settings) as engine, running_worker(settings, engine) as worker:
        until(lambda: "heads-2" in names(engine), "the candidate is loaded")
        send(client, 8)
        client.results(8)
        scheduler_of(database, settings).run_once(DatabaseClock(database).measure())
        ended = on_trial.now()
        assert ended.state is (RefreshState.KEPT if uses_it else RefreshState.REJECTED)
        assert "after 8 jobs" in ended.sentence
        worker.worker.candidates.look()
        worker.worker.deciding.evidence_cache.refresh()
        assert worker.worker.candidates.rivals() == {}, "the trial is over"
        stale = {drafter.name for drafter in worker.worker.decider._drafters() if drafter.is_stale}
        assert stale == (set() if uses_it else {"heads-2", "both-2"})
    with engine_of(settings) as engine, running_worker(settings, engine) as again:
        if uses_it:
            until(lambda: names(engine) >= {"heads-2", "both-2"}, "a kept one is loaded after a restart")
        again.worker.candidates.look()
        assert not again.worker.candidates.rivals()
        assert uses_it == ("heads-2" in names(engine))


def with_choices(choices: Mapping[str, str | None]) -> Callable[..., Any]:
    from scheduler.refreshing import ended_trials

    return lambda models, known, statuses, speedups, decided, num_jobs: ended_trials(
        models, known, statuses, speedups, choices, num_jobs
    )


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize("fault", ["altered", "gone", "name is taken", "other weights", "pickle"])
def test_of_a_candidate_that_cannot_be_loaded_the_refresh_says_why_and_no_job_suffers(
    settings: Settings, database: Database, on_trial: Trial, fault: str
) -> None:
    why = {
        "altered": "other content",
        "gone": "found none",
        "name is taken": "no drafter in the settings with the candidate's name heads-2",
        "other weights": "to be the draft",
        "pickle": "no weights beside those",
    }[fault]
    if fault == "altered":
        weights = next(on_trial.folder.glob("*.safetensors"))
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    elif fault == "gone":
        next(on_trial.folder.glob("*.safetensors")).unlink()
    elif fault == "other weights":
        changed_branches = settings.models.drafters["heads"].model_copy(update={"num_branches": 2})
        settings = with_drafter(settings, "heads", changed_branches)
    elif fault == "name is taken":
        settings = with_drafter(settings, "heads-2", settings.models.drafters["lookup"])
    else:
        torch.save({}, on_trial.folder / "pickle.safetensors")
    client = Client(settings)
    with engine_of(settings) as engine, running_worker(settings, engine):
        until(lambda: on_trial.now().sentence.startswith("not loaded: "), "the refresh says why")
        send(client, 4)
        assert len(client.results(4)) == 4
        assert "heads-2" not in names(engine) or fault == "name is taken"
    found = on_trial.now()
    assert found.state is RefreshState.TRIAL
    assert why in found.sentence
    assert WorkerStore(database).seen() == []


def with_drafter(settings: Settings, name: str, drafter: Any) -> Settings:
    drafters = {**settings.models.drafters, name: drafter}
    return settings.model_copy(update={"models": settings.models.model_copy(update={"drafters": drafters})})
