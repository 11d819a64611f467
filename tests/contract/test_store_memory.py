"""The memory of tasks in Postgres: shared by workers, warm at a start; and what is erased is nowhere any more."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from alphaloop.errors import ConfigError
from alphaloop.messages import Body, Job, Mode, Purpose, Result
from alphaloop.probes import ProbeText, new_probe_set
from alphaloop.settings import TaskSettings
from alphaloop.store.api import Deed
from alphaloop.store.database import Database
from alphaloop.store.housekeeping import EraseStore, Erasure
from alphaloop.store.jobs import JobStore
from alphaloop.store.outcomes import OutcomeStore
from alphaloop.store.probes import ProbeRun, ProbeSetStore, ProbeStore
from alphaloop.store.task_memory import ResultMemoryStore, ResultToRemember
from alphaloop.tables import metadata
from tests.fixtures.runs import claim, decode_run, outcome, vanilla_counts
from worker.task_memory.memory import RememberedTasks

pytestmark = pytest.mark.postgres

NOW = datetime.now(UTC)
DEED = Deed("command", "ada", "texts_erased", "job a")
REVISION = "target-1"
SECRET = "the code of the vault"


def end(
    database: Database,
    job_id: str,
    tokens: Sequence[int],
    *,
    segment: str = "",
    batch_id: str | None = None,
    task: str = "sql",
    revision: str = REVISION,
    words: str = SECRET,
) -> None:
    """A job that is claimed and ends with a text of these tokens."""
    claim(database, job_id, task=task, segment=segment, batch_id=batch_id)
    remembered = ResultToRemember(task, segment, batch_id, revision, tokens)
    ended = replace(outcome(job_id, text=words, task=task), remembered=remembered)
    OutcomeStore(database).record([ended], owner="w")


def worker(database: Database, **tasks: TaskSettings) -> RememberedTasks:
    """The memory of a worker that starts now."""
    given = tasks or {"sql": TaskSettings(memory="segment")}
    memory = RememberedTasks(ResultMemoryStore(database), REVISION, lambda: given)
    memory.load()
    memory.merge()
    return memory


def look(memory: RememberedTasks) -> None:
    memory.follow()
    memory.merge()


def found(memory: RememberedTasks, query: Sequence[int], *, task: str = "sql", segment: str = "") -> list[list[int]]:
    view = memory.view(task, segment, 1, 16)
    return [] if view is None else sorted(behind for _, behind in view.continuations(query, 8))


def test_what_one_worker_recorded_every_other_finds_and_one_that_starts_is_warm(database: Database) -> None:
    here, there = worker(database), worker(database)
    end(database, "a", [5, 6, 7, 8])
    for memory in (here, there):
        assert found(memory, [5, 6]) == []
        look(memory)
        assert found(memory, [5, 6]) == [[7, 8]]
    assert found(worker(database), [5, 6]) == [[7, 8]]


def test_results_that_are_read_twice_are_kept_once(database: Database) -> None:
    """A transaction that runs while another reads: what commits in between is read again."""
    memory = worker(database)
    with database.begin() as connection:
        connection.execute(text("SELECT pg_current_xact_id()"))
        end(database, "a", [5, 6, 7, 8])
        look(memory)
        look(memory)
        assert found(memory, [5, 6]) == [[7, 8]]
    end(database, "b", [5, 6, 9])
    look(memory)
    assert found(memory, [5, 6]) == [[7, 8], [9]]


@pytest.mark.parametrize(("task", "segment"), [("sql", "free"), ("sql", ""), ("code", "gold"), ("chat", "gold")])
def test_nothing_crosses_a_scope(database: Database, task: str, segment: str) -> None:
    memory = worker(
        database, sql=TaskSettings(memory="segment"), code=TaskSettings(memory="segment"), chat=TaskSettings()
    )
    end(database, "a", [5, 6, 7], segment="gold")
    end(database, "b", [5, 6, 7], segment="gold", task="chat")
    end(database, "c", [5, 6, 8], segment="gold", revision="another target")
    look(memory)
    assert found(memory, [5, 6], segment="gold") == [[7]]
    assert found(memory, [5, 6], task=task, segment=segment) == []


def test_a_shared_memory_shows_other_segments_what_two_batches_wrote(database: Database) -> None:
    memory = worker(database, sql=TaskSettings(memory="shared"))
    end(database, "a", [5, 6, 7, 8], segment="gold", batch_id="x")
    look(memory)
    assert (found(memory, [5], segment="gold"), found(memory, [5], segment="free")) == ([[6, 7, 8]], [])
    end(database, "b", [5, 6, 7, 9], segment="gold", batch_id="y")
    look(memory)
    assert found(memory, [5], segment="free") == [[6, 7], [6, 7]]


def test_the_oldest_are_forgotten_everywhere_beyond_the_bound(database: Database) -> None:
    bound = TaskSettings(memory="segment", max_memory_bytes=1 << 16)
    here, there = worker(database, sql=bound), worker(database, sql=bound)
    for number in range(20):
        end(database, f"j-{number}", [1000 * number + token for token in range(1, 500)])
    look(here)
    look(here)
    look(there)
    for memory in (here, there, worker(database, sql=bound)):
        assert memory.num_tokens("sql") * 8 <= bound.max_memory_bytes
        assert (found(memory, [1, 2]), found(memory, [19_001])) == ([], [[19_000 + token for token in range(2, 10)]])


def test_a_memory_that_is_turned_on_or_off_follows(database: Database) -> None:
    end(database, "a", [5, 6, 7], segment="gold")
    tasks = {"sql": TaskSettings()}
    memory = RememberedTasks(ResultMemoryStore(database), REVISION, lambda: tasks)
    memory.load()
    for mode, shown in (("segment", [[7]]), ("off", []), ("shared", [[7]])):
        tasks["sql"] = TaskSettings.model_validate({"memory": mode})
        look(memory)
        assert found(memory, [5, 6], segment="gold") == shown


def test_a_worker_that_did_not_look_for_long_reads_everything_anew(database: Database) -> None:
    now = 0.0
    memory = RememberedTasks(
        ResultMemoryStore(database), REVISION, lambda: {"sql": TaskSettings(memory="segment")}, clock=lambda: now
    )
    end(database, "a", [5, 6, 7])
    memory.load()
    database.change(text("DELETE FROM remembered_results"))
    now = 86_400.0
    look(memory)
    assert found(memory, [5, 6]) == []


def everything(database: Database) -> str:
    """All rows of all tables, as text."""
    return "\n".join(
        str(row)
        for table in metadata.sorted_tables
        for row in database.scalars(text(f"SELECT t::text FROM {table.name} AS t"))
    )


def drawn_probe(database: Database, job_id: str, segment: str) -> None:
    """The prompt of a job becomes a probe, which is sent, decoded and recorded."""
    origin = Job(job_id=job_id, task="sql", segment=segment, body=Body(prompt=SECRET))
    made = new_probe_set("sql", [{"prompt": SECRET}], num_draft_tokens=3, max_tokens=8, drawn_from=[origin])
    ProbeSetStore(database).register(made, NOW)
    probe_id = f"probe of {job_id}"
    sent = ProbeRun(probe_id, "s", NOW, "sql", made.version, 0, made.prompts[0].prompt_id, "probe", "lookup", 3, b"")
    ProbeStore(database).record([sent])
    claim(database, probe_id, task="sql", purpose=Purpose.PROBE)
    ended = replace(
        outcome(
            probe_id,
            text=SECRET,
            task="sql",
            run=decode_run(vanilla_counts(2), task="sql", mode=Mode.VANILLA, purpose=Purpose.PROBE),
        ),
        probe_text=ProbeText((77, 78), "stop", 8, 0.1),
    )
    OutcomeStore(database).record([ended], owner="w")


@pytest.mark.parametrize(
    "erasure",
    [Erasure(("a",)), Erasure(segment="acme"), Erasure(before=NOW + timedelta(days=1))],
    ids=["job", "segment", "before"],
)
def test_what_is_erased_is_in_no_table_and_in_no_worker(database: Database, erasure: Erasure) -> None:
    memory = worker(database)
    end(database, "a", [5, 6, 7, 8], segment="acme")
    drawn_probe(database, "a", "acme")
    look(memory)
    assert SECRET in everything(database)
    assert found(memory, [5, 6], segment="acme") == [[7, 8]]

    store = EraseStore(database)
    counted = store.count(erasure)
    assert SECRET in everything(database), "counting erases nothing"
    assert (counted.num_jobs, counted.num_remembered, counted.num_drawn_probes) == (2, 1, 1)
    assert store.erase(erasure, DEED, None, NOW) == counted
    assert SECRET not in everything(database)
    assert "[77,78]" not in everything(database).replace(" ", "").replace("{", "[").replace("}", "]")
    held = memory.view("sql", "acme", 1, 16)
    memory.follow()
    assert held is not None
    assert held.continuations([5, 6], 8) == []
    assert found(worker(database), [5, 6], segment="acme") == []
    left = store.count(erasure)
    assert (left.num_jobs, left.num_remembered, left.num_drawn_probes, left.num_probe_texts) == (0, 0, 0, 0)
    assert [(row.action, row.by) for row in database.rows(text("SELECT action, by FROM audit"))] == [
        ("texts_erased", "ada")
    ]


def test_a_job_that_is_erased_is_still_known_and_its_result_says_so(database: Database) -> None:
    end(database, "a", [5, 6])
    end(database, "b", [5, 6], segment="acme", words='nul \x00 and "erased_at": a quote')
    EraseStore(database).erase(Erasure(("a",)), DEED, None, NOW)
    (again,) = claim(database, "a", task="sql")
    assert again.outcome is not None
    result = Result.decode(again.outcome)
    assert (result.text, result.erased_at, result.status) == (None, NOW, "succeeded")
    assert EraseStore(database).count(Erasure(segment="acme")).num_jobs == 1, "the words of a text are no mark"
    EraseStore(database).erase(Erasure(segment="acme"), DEED, None, NOW)
    (other,) = claim(database, "b", task="sql", segment="acme")
    assert json.loads(other.outcome or b"")["erased_at"]


def test_others_keep_their_texts_and_running_jobs_are_told_of(database: Database) -> None:
    end(database, "a", [5, 6], segment="acme")
    end(database, "b", [5, 7], segment="other", words="kept")
    claim(database, "c", task="sql", segment="acme")
    found_texts = EraseStore(database).erase(Erasure(segment="acme"), DEED, None, NOW)
    assert (found_texts.num_jobs, found_texts.num_running) == (1, 1)
    assert "kept" in everything(database)
    assert JobStore(database).release({"c": 1}, owner="w") == {"c"}
    assert found(worker(database), [5], segment="other") == [[7]]


def test_texts_elsewhere_are_deleted_or_the_command_refuses(database: Database) -> None:
    end(database, "a", [5, 6])
    database.change(text("INSERT INTO stored_texts (url, job_id, stored_at) VALUES ('file:///t/1', 'a', now())"))
    with pytest.raises(ConfigError, match="claim_check"):
        EraseStore(database).erase(Erasure(("a",)), DEED, None, NOW)
    deleted: list[str] = []
    EraseStore(database).erase(Erasure(("a",)), DEED, deleted.append, NOW)
    assert deleted == ["file:///t/1"]
    assert EraseStore(database).count(Erasure(("a",))).num_stored_texts == 0


def test_exactly_one_selection_is_given() -> None:
    with pytest.raises(ConfigError, match="one of --job"):
        Erasure()
    with pytest.raises(ConfigError, match="one of --job"):
        Erasure(("a",), segment="b")


@pytest.mark.roles("alphaloop_worker")
def test_a_worker_may_remember_and_forget_with_its_role(database: Database) -> None:
    end(database, "a", [5, 6, 7])
    memory = worker(database)
    assert found(memory, [5]) == [[6, 7]]
    assert ResultMemoryStore(database).make_room(REVISION, "sql", 4) == 0
