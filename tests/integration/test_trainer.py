"""A refresh from the prompts of traffic to a trial, on a real broker and Postgres with a tiny target."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from alphaloop.explaining.refreshing import refresh_lines
from alphaloop.probes import new_probe_set
from alphaloop.settings import ModelSettings, Settings
from alphaloop.settings.endpoints import EndpointSettings
from alphaloop.settings.models import HeadsDrafterSettings, TargetSettings
from alphaloop.settings.processes import RefreshSettings
from alphaloop.store.api import Deed
from alphaloop.store.database import Database, DatabaseClock
from alphaloop.store.decision_inputs import DraftRegistry, DraftStatus
from alphaloop.store.housekeeping import EraseStore, Erasure
from alphaloop.store.outcomes import OutcomeStore
from alphaloop.store.probes import ProbeSetStore
from alphaloop.store.refreshes import Refresh, RefreshReason, RefreshState, RefreshStore
from alphaloop.store.workers import WorkerLoad, WorkerStore
from engine.models import find_weights
from tests.fixtures.deciding import SETUP
from tests.fixtures.heads import noisy_heads
from tests.fixtures.runs import claim, outcome
from tests.fixtures.worker import Client, until
from worker.trainer import LEASE_S, Trainer
from worker.training.capture import take_prompts
from worker.training.keep import KeptDrafts

pytestmark = [pytest.mark.postgres, pytest.mark.kafka]

NUM_JOBS: Final = 100


@pytest.fixture
def target(trainable_target: Path) -> Path:
    return trainable_target


@pytest.fixture
def settings(worker_settings: Settings, target: Path, tmp_path: Path) -> Settings:
    parent = noisy_heads(target, tmp_path / "parent")
    served = TargetSettings(name="tiny", source=str(target), dtype="float32", device="cpu")
    models = ModelSettings(target=served, drafters={"heads": HeadsDrafterSettings(source=str(parent))})
    tasks = {
        name: task.model_copy(update={"train_from_traffic": name == "code"})
        for name, task in worker_settings.tasks.items()
    }
    refresh = RefreshSettings(min_texts=10)
    update = {"models": models, "tasks": tasks, "refresh": refresh, "data_dir": tmp_path / "data"}
    return worker_settings.model_copy(update=update)


@pytest.fixture
def traffic(settings: Settings, database: Database, client: Client) -> Sequence[str]:
    """Jobs that have ended, of a task that consents and of another."""
    for task in ("code", "sql"):
        job_ids = [f"{task}-{number}" for number in range(NUM_JOBS)]
        bodies = [{"prompt": f"{task} number {number}", "max_tokens": 16} for number in range(NUM_JOBS)]
        lines = [{"job_id": job_id, "task": task, "body": body} for job_id, body in zip(job_ids, bodies, strict=True)]
        client.send(task, [json.dumps(line).encode() for line in lines])
        claim(database, *job_ids, task=task)
        OutcomeStore(database).record([outcome(job_id, task=task) for job_id in job_ids], owner="w")
    return [f"code-{number}" for number in range(NUM_JOBS)]


@pytest.fixture
def client(settings: Settings) -> Client:
    return Client(settings)


def opened(settings: Settings, database: Database) -> Refresh:
    now, served = DatabaseClock(database).measure(), settings.models
    parent = find_weights(served.drafters["heads"].source).revision  # type: ignore[union-attr]
    revision = find_weights(served.target.source).revision
    return RefreshStore(database).open("heads", revision, parent, RefreshReason.BY_HAND, now)


def trained(settings: Settings, database: Database, stop: threading.Event | None = None) -> Refresh:
    """The refresh after one trainer has had it; the lease of a trainer before has run out."""
    clock = DatabaseClock(database)
    late = clock.measure() + timedelta(seconds=LEASE_S + 1)
    trainer = Trainer(settings, database, stop or threading.Event(), now=clock.now)
    assert trainer.run_once(late)
    return RefreshStore(database).of("heads")[0]


def command(tmp_path: Path, code: str) -> tuple[str, ...]:
    head = "import shutil, sys\ndataset, target, parent, out = sys.argv[1:]\n"
    (script := tmp_path / "train.py").write_text(head + code)
    return sys.executable, str(script)


def with_command(settings: Settings, command: tuple[str, ...]) -> Settings:
    return settings.model_copy(update={"refresh": settings.refresh.model_copy(update={"command": command})})


def test_a_trainer_trains_from_traffic_and_has_what_is_better_tried(
    settings: Settings, database: Database, traffic: Sequence[str]
) -> None:
    opened(settings, database)
    refresh = trained(settings, database)
    assert refresh.state is RefreshState.TRIAL, refresh.sentence
    assert refresh.candidate_name == "heads-2"
    assert refresh.figures is not None
    assert refresh.figures["total"]["low"] > 1
    assert "tokens a round" in refresh.sentence
    folder = KeptDrafts(settings).fetch(refresh.location or "")
    assert find_weights(str(folder)).revision == refresh.candidate_revision
    (draft,) = DraftRegistry(database).all()
    assert (draft.drafter, draft.draft_revision) == ("heads-2", refresh.candidate_revision)
    assert draft.status is DraftStatus.CANDIDATE
    assert (draft.trained_for, draft.parent_revision) == (refresh.target_revision, refresh.parent_draft_revision)
    assert not any((settings.data_dir / "refreshes").iterdir()), "texts go with the row"


@pytest.mark.timeout(400)
def test_a_trainer_that_was_killed_is_followed_by_the_next_one(
    settings: Settings,
    database: Database,
    traffic: Sequence[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    refresh = opened(settings, database)
    texts = settings.data_dir / "refreshes" / str(refresh.id) / "draft" / ".training" / "texts.jsonl"
    monkeypatch.setenv("ALPHALOOP_CONFIGS", str(configs(settings, tmp_path, monkeypatch)))
    child = subprocess.Popen([sys.executable, "-m", "worker.trainer"])
    try:
        until(
            lambda: child.poll() is not None or (texts.exists() and texts.stat().st_size > 0),
            "a text is written",
            timeout_s=240.0,  # the child imports torch and loads a model, beside every other test
        )
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
    assert RefreshStore(database).of("heads")[0].state is RefreshState.TRAINING
    with caplog.at_level(logging.INFO, "worker.trainer"):
        refresh = trained(settings, database)
    assert (refresh.state, refresh.attempt) == (RefreshState.TRIAL, 2), refresh.sentence
    assert any("of them by an earlier run" in record.getMessage() for record in caplog.records)


def configs(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The settings of this test for a process of its own."""
    folder, models = tmp_path / "configs", settings.models
    folder.mkdir()
    parent = models.drafters["heads"]
    assert isinstance(parent, HeadsDrafterSettings)
    (folder / "models.toml").write_text(
        f'[models.target]\nname = "tiny"\nsource = "{models.target.source}"\ndtype = "float32"\ndevice = "cpu"\n'
        f'[models.drafters.heads]\nmethod = "heads"\nsource = "{parent.source}"\n'
    )
    (folder / "tasks.toml").write_text("[tasks.code]\ntrain_from_traffic = true\n[tasks.sql]\n")
    (folder / "scheduler.toml").write_text("[refresh]\nmin_texts = 10\n")
    assert settings.postgres.url is not None
    monkeypatch.setenv("DATABASE_URL", settings.postgres.url.get_secret_value())
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", settings.kafka.bootstrap_servers or "")
    monkeypatch.setenv("ALPHALOOP_KAFKA__EXTRA", json.dumps(settings.kafka.extra))
    monkeypatch.setenv("ALPHALOOP_DATA_DIR", str(settings.data_dir))
    return folder


def test_a_trainer_that_is_stopped_gives_the_refresh_back(
    settings: Settings, database: Database, traffic: Sequence[str], tmp_path: Path
) -> None:
    opened(settings, database)
    stop = threading.Event()
    stop.set()
    refresh = trained(settings, database, stop)
    assert (refresh.state, refresh.sentence) == (RefreshState.WAITING, "the trainer was stopped")
    assert (settings.data_dir / "refreshes" / str(refresh.id) / "prompts.jsonl").exists()


def test_erased_jobs_are_in_no_dataset(
    settings: Settings, database: Database, traffic: Sequence[str], tmp_path: Path
) -> None:
    seen = tmp_path / "seen.jsonl"
    keep = command(tmp_path, f"shutil.copy(dataset, {str(seen)!r}); sys.exit(75)\n")
    erase(database, "code-3")
    opened(settings, database)
    refresh = trained(with_command(settings, keep), database)
    assert refresh.state is RefreshState.WAITING
    first = ids_in(seen)
    assert 10 <= len(first) < NUM_JOBS
    assert "code-3" not in first
    # Erased between two attempts: the refresh has ended, and its texts go with the trainer's next look.
    erase(database, first[0])
    assert not RefreshStore(database).of("heads")[0].is_open
    clock = DatabaseClock(database)
    late = clock.measure() + timedelta(hours=1)
    assert not Trainer(settings, database, threading.Event(), now=clock.now).run_once(late)
    assert not any((settings.data_dir / "refreshes").iterdir())
    opened(settings, database)
    trained(with_command(settings, keep), database)
    assert set(ids_in(seen)) == set(first) - {first[0]}


def ids_in(file: Path) -> list[str]:
    return [json.loads(line)["job_id"] for line in file.read_text().splitlines()]


def erase(database: Database, job_id: str) -> None:
    deed = Deed("command", "operator", "texts_erased", job_id)
    EraseStore(database).erase(Erasure((job_id,)), deed, None, DatabaseClock(database).measure())


def test_an_erasure_while_it_trains_stops_the_command(
    settings: Settings, database: Database, traffic: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.trainer.LEASE_S", 1.0)
    begun = tmp_path / "begun"
    wait = command(tmp_path, f"open({str(begun)!r}, 'w').close(); import time; time.sleep(600)\n")
    opened(settings, database)
    taken = take_prompts(settings, frozenset())
    trainer = threading.Thread(target=trained, args=(with_command(settings, wait), database), daemon=True)
    trainer.start()
    until(begun.exists, "the command runs")
    erase(database, taken[0].job_id)
    trainer.join(30)
    assert not trainer.is_alive()
    assert RefreshStore(database).of("heads")[0].sentence == "texts of its jobs were erased"
    assert not any((settings.data_dir / "refreshes").iterdir())


def test_probes_and_tasks_that_do_not_consent_are_left_out(
    settings: Settings, database: Database, traffic: Sequence[str]
) -> None:
    taken = take_prompts(settings, frozenset())
    assert {each.task for each in taken} == {"code"}
    assert len(taken) == NUM_JOBS
    assert 0.05 < sum(each.is_held_out for each in taken) / NUM_JOBS < 0.4
    bodies = [{"prompt": f"code number {number}", "max_tokens": 7} for number in range(5)]
    probes = new_probe_set("code", bodies, num_draft_tokens=3, max_tokens=48)
    ProbeSetStore(database).register(probes, DatabaseClock(database).measure())
    left = take_prompts(settings, ProbeSetStore(database).prompt_ids())
    assert {each.job_id for each in taken} - {each.job_id for each in left} == {f"code-{number}" for number in range(5)}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda s, _: refreshing(s, min_texts=NUM_JOBS + 1), f"too few prompts: expected {NUM_JOBS + 1} of tasks with"),
        (lambda s, _: s.model_copy(update={"tasks": {}}), "too few prompts: no task of this target has train_from"),
        (lambda s, _: refreshing(s, max_training_s=0.001), "training took longer than refresh.max_training_s"),
        (lambda s, path: with_command(s, command(path, "sys.exit('diverged')\n")), "code 1: diverged"),
        (lambda s, path: with_command(s, command(path, SPOILT)), "expected inner.weight of"),
    ],
)
def test_what_cannot_be_trained_fails_with_the_reason(
    settings: Settings,
    database: Database,
    traffic: Sequence[str],
    tmp_path: Path,
    change: Callable[[Settings, Path], Settings],
    why: str,
) -> None:
    opened(settings, database)
    refresh = trained(change(settings, tmp_path), database)
    assert refresh.state is RefreshState.FAILED
    assert why in refresh.sentence
    assert DraftRegistry(database).all() == []


SPOILT: Final = """
from safetensors.torch import load_file, save_file
weights = load_file(parent + "/model.safetensors")
save_file(weights | {"inner.weight": weights["inner.weight"][1:].contiguous()}, out + "/model.safetensors")
shutil.copy(parent + "/config.json", out)
"""


def refreshing(settings: Settings, **fields: Any) -> Settings:
    return settings.model_copy(update={"refresh": settings.refresh.model_copy(update=fields)})


def test_a_candidate_that_is_nowhere_better_is_rejected(
    settings: Settings, database: Database, traffic: Sequence[str], tmp_path: Path
) -> None:
    same = command(tmp_path, "[shutil.copy(f'{parent}/{f}', out) for f in ('config.json', 'model.safetensors')]\n")
    opened(settings, database)
    refresh = trained(with_command(settings, same), database)
    assert refresh.state is RefreshState.REJECTED
    assert refresh.sentence.startswith("nowhere better: ")
    assert refresh.figures is not None
    assert refresh.figures["total"]["ratio"] == 1
    assert DraftRegistry(database).all() == []


SERVED: Final = "answers-1"  # the revision of the target by the answers of its servers


def with_servers(settings: Settings, database: Database, *, target: str = "tiny") -> Settings:
    """The same target, decoded by servers that draft with its heads, and a worker that sends jobs there."""
    models = settings.models
    served = models.target.model_copy(update={"engine": "server"})
    endpoint = EndpointSettings(kind="vllm", url="http://gpu-1:8000/v1", drafter="heads", num_draft_tokens=4)
    drafters = (models.drafters["heads"].state("heads", "vllm-0.32.0"),)
    setup = replace(SETUP, drafters=drafters, facts=replace(SETUP.facts, target_revision=SERVED))
    WorkerStore(database).say(WorkerLoad("w", "servers", target, 1, 0, 0, {}, setup=setup))
    RefreshStore(database).open(
        "heads", SERVED, "vllm-0.32.0", RefreshReason.BY_HAND, DatabaseClock(database).measure()
    )
    models = ModelSettings(target=served, drafters=models.drafters, endpoints={"gpu": endpoint})
    return settings.model_copy(update={"models": models})


def test_what_servers_would_draft_with_is_kept_and_the_hook_is_called(
    settings: Settings, database: Database, traffic: Sequence[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (hook := tmp_path / "hook.py").write_text("import sys\nprint(*sys.argv[1:])\nsys.exit('gpu-1 does not answer')\n")
    settings = refreshing(with_servers(settings, database), hook=(sys.executable, str(hook)))
    with caplog.at_level(logging.INFO, "worker.trainer"):
        refresh = trained(settings, database)
    assert refresh.state is RefreshState.KEPT, refresh.sentence
    folder = KeptDrafts(settings).fetch(refresh.location or "")
    assert find_weights(str(folder)).revision == refresh.candidate_revision
    said = f"the hook ended with code 1: tiny heads-2 {refresh.candidate_revision} {folder} / gpu-1 does not answer"
    assert refresh.sentence.startswith(
        f"no trial, because servers load their drafts themselves: heads-2 lies in {folder}; {said}; "
    )
    assert "tokens a round" in refresh.sentence
    assert refresh.figures is not None
    (line,) = refresh_lines(database, settings.models, drafter="heads")
    assert line.in_words.startswith(refresh.sentence), "every screen has it"
    (event,) = [record for record in caplog.records if record.__dict__.get("action") == "refresh_hook"]
    assert (event.getMessage(), event.__dict__["drafter"]) == (said, "heads-2")
    assert not any((settings.data_dir / "refreshes").iterdir())


def test_without_a_hook_a_refresh_says_where_the_draft_of_a_server_lies(
    settings: Settings, database: Database, traffic: Sequence[str]
) -> None:
    settings = with_servers(settings, database)
    refresh = trained(settings, database)
    assert refresh.state is RefreshState.KEPT, refresh.sentence
    folder = settings.data_dir / "drafts" / (refresh.candidate_revision or "")
    assert f"heads-2 lies in {folder}, and refresh.hook is not set; " in refresh.sentence


def test_a_trainer_leaves_refreshes_of_other_servers_to_others(
    settings: Settings, database: Database, traffic: Sequence[str]
) -> None:
    refresh = trained(with_servers(settings, database, target="another"), database)
    assert (refresh.state, refresh.sentence) == (RefreshState.WAITING, "this trainer has the target tiny")


def test_a_stop_while_the_hook_runs_gives_the_refresh_back(
    settings: Settings, database: Database, traffic: Sequence[str], tmp_path: Path
) -> None:
    begun, stop = tmp_path / "begun", threading.Event()
    code = f"open({str(begun)!r}, 'w').close()\nimport time\ntime.sleep(600)\n"
    (hook := tmp_path / "hook.py").write_text(code)
    settings = refreshing(with_servers(settings, database), hook=(sys.executable, str(hook)))
    trainer = threading.Thread(target=trained, args=(settings, database, stop), daemon=True)
    trainer.start()
    until(begun.exists, "the hook runs", 60.0)
    stop.set()
    trainer.join(60)
    assert not trainer.is_alive()
    (refresh,) = RefreshStore(database).of("heads")
    assert (refresh.state, refresh.candidate_name) == (RefreshState.WAITING, None)
