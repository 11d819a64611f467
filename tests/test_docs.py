"""What the documents say is so: paths, links, commands, programs, queries, settings and figures."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

import psycopg
import pytest
from pydantic import BaseModel, SecretStr

import alphaloop
from alphaloop.cli.app import app
from alphaloop.deciding.posterior import tokens_per_round
from alphaloop.kafka.offsets import Record
from alphaloop.kafka.topics import ensure_topics
from alphaloop.messages import (
    AnswerMessage,
    Body,
    Choice,
    ChosenToken,
    DecodingReport,
    Failure,
    Job,
    Origin,
    Result,
    Timings,
    Usage,
    parse_job,
)
from alphaloop.settings import KafkaSettings, Settings, TaskSettings
from tests.fixtures.sql_questions import Question, all_questions
from tests.fixtures.worker import read

ROOT: Final = Path(__file__).resolve().parents[1]
README: Final = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES: Final = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ASKING: Final = (ROOT / "docs" / "guides" / "ask-the-database.md").read_text(encoding="utf-8")


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), re.MULTILINE | re.DOTALL)


def file_map() -> dict[str, str]:
    return dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", text("docs/file-map.md"), re.MULTILINE))


def test_everything_in_the_file_map_exists() -> None:
    for path, said in file_map().items():
        assert (ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file(), path
        assert said.strip()


def test_the_file_map_leaves_nothing_important_out() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [Path(name) for name in listed.split("\0") if name]
    top = {f"{path.parts[0]}/" if len(path.parts) > 1 else path.name for path in paths}
    packages = {
        f"{path.parent.as_posix()}/"
        for path in paths
        if path.name == "__init__.py" and path.parts[0] in ("alphaloop", "engine", "worker", "scheduler")
    }
    hidden_or_itself = {name for name in top if name.startswith(".") and name != ".env.example"} | {"README.md"}
    assert (top | packages) - hidden_or_itself <= set(file_map())


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.name}: {link}"


def test_every_make_command_of_the_documents_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", text("Makefile"), re.MULTILINE))
    assert {"help", "demo", "test", "check", "up", "down"} <= targets
    shown = re.findall(r"^([\w-]+): .*## .+$", text("Makefile"), re.MULTILINE)
    assert {"help", "demo", "test", "check", "up", "down"} <= set(shown), "make help names it"
    for page in PAGES:
        for command in re.findall(
            r"(?:^|`)make ([a-z-]+(?: test)?)(?= +#|`|$)", page.read_text(encoding="utf-8"), re.MULTILINE
        ):
            assert set(command.split()) <= targets, f"{page.name}: make {command}"


def test_every_alphaloop_command_of_the_documents_exists() -> None:
    from typer.main import get_command

    commands = set(getattr(get_command(app), "commands", {}))
    for page in PAGES:
        for command in re.findall(r"(?:`|/bin/)alphaloop ([a-z]+(?:-[a-z]+)*)", page.read_text(encoding="utf-8")):
            assert command in commands, f"{page.name}: alphaloop {command}"


def test_the_tests_own_command_is_the_one_ci_runs() -> None:
    assert "\nmake test " in README
    assert "\nmake check\nmake test\n" in text(".ci/run")


@pytest.mark.kafka
def test_the_producer_of_the_guide_produces_jobs(kafka_settings: KafkaSettings, fresh_prefix: str) -> None:
    (program,) = blocks("docs/guides/enqueue.md", "python")
    assert len([line for line in program.splitlines() if line.strip()]) <= 10
    assert kafka_settings.bootstrap_servers
    ensure_topics(kafka_settings, ["chat"])
    mine = program.replace("poem-", f"{fresh_prefix}-")
    done = subprocess.run(
        [sys.executable, "-c", mine],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "KAFKA_BOOTSTRAP_SERVERS": kafka_settings.bootstrap_servers},
    )
    assert (done.returncode, done.stdout) == (0, "sent\n"), done.stderr

    def own(records: list[Record]) -> list[Record]:
        return [one for one in records if (one.key or b"").startswith(fresh_prefix.encode())]

    prompts = {}
    for record in own(read(kafka_settings, ["jobs.chat"], lambda records: len(own(records)) == 2)):
        job = parse_job(record.value, Origin("c", "jobs.chat", 0, 0), task="chat")
        assert (record.key or b"").decode() == job.job_id
        prompts[job.job_id] = job.body.messages[0].content
    assert prompts == {
        f"{fresh_prefix}-0": "Write a haiku about rivers.",
        f"{fresh_prefix}-1": "Name three prime numbers.",
    }


def test_every_page_with_sql_is_read() -> None:
    num_blocks = sum(page.read_text(encoding="utf-8").count("```sql") for page in PAGES)
    assert num_blocks == len(all_questions()) >= 30
    assert len({question.name for question in all_questions()}) == num_blocks


@pytest.mark.postgres
@pytest.mark.parametrize("question", all_questions(), ids=lambda question: question.name)
def test_every_sample_of_sql_runs(question: Question, database_url: SecretStr) -> None:
    with psycopg.connect(database_url.get_secret_value()) as connection:
        connection.execute(question.sql)
        connection.rollback()


@pytest.mark.parametrize(
    "question", [one for one in all_questions() if "task_speedup_now" in one.sql], ids=lambda one: one.name
)
def test_a_shown_speed_up_has_its_k_load_and_interval(question: Question) -> None:
    for column in ("num_draft_tokens", "mean_running", "speedup_low", "speedup_high", "verdict"):
        assert column in question.sql, f"{question.name}: {column}"


@pytest.mark.postgres
@pytest.mark.parametrize("name", ["alpha", "speedup", "decisions"])
def test_the_shown_output_has_the_querys_columns(name: str, database_url: SecretStr) -> None:
    found = re.search(
        rf"<!-- sql: {name} -->\n```sql\n(.*?)```\n<!-- sql-output: {name} -->\n(?:```\n(.*?)```)?", ASKING, re.DOTALL
    )
    assert found, f"the page has lost its query {name}"
    query, output = found.groups()
    with psycopg.connect(database_url.get_secret_value()) as connection:
        columns = [column.name for column in connection.execute(query).description or ()]
    if output is not None:
        assert [cell.strip() for cell in output.splitlines()[0].split("|")] == columns


_REFERRED_TO = [Job, Body, Result, Usage, Choice, AnswerMessage, ChosenToken, Timings, DecodingReport, Failure]


def test_the_jobs_of_the_reference_are_jobs() -> None:
    *sent, answered, refused = blocks("docs/reference/messages.md", "json")
    jobs = [parse_job(block.encode(), Origin("c", "jobs.code", 0, 0), task="code") for block in sent]
    assert len(jobs) == 2
    assert Result.decode(refused.encode()).origin is not None
    calling = Result.decode(answered.encode())
    assert json.loads(calling.encode()) == json.loads(answered)
    assert calling.messages[0].tool_calls
    (small,) = re.findall(r"echo '(\{.*\})' \| kcat", text("docs/guides/enqueue.md"))
    assert parse_job(small.encode(), Origin("c", "jobs.code", 0, 0), task="code").body.messages == jobs[0].body.messages


@pytest.mark.parametrize("model", _REFERRED_TO)
def test_the_reference_names_every_field(model: type[BaseModel]) -> None:
    said = set(re.findall(r"[a-z][a-z_]+|(?<=`)[a-z](?=`)", text("docs/reference/messages.md")))
    assert set(model.model_fields) <= said


def test_every_page_that_an_error_names_comes_with_the_package() -> None:
    hints = ""
    packages = ("alphaloop", "engine", "worker", "scheduler")
    for path in (path for package in packages for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "hint":
                hints += f"{ast.unparse(node.value)}\n"
    named = re.findall(r"page\(['\"]([^'\"]+)['\"]\)", hints)
    assert len(named) >= 5
    assert all((ROOT / "docs" / name).is_file() for name in named), named
    assert "docs/" not in hints, "page() says where it lies on the reader's machine"


def test_every_setting_that_is_named_exists() -> None:
    pattern = rf"`((?:{'|'.join(Settings.model_fields)})\.[a-z_.]+)`"
    named = [(page.name, name) for page in PAGES for name in re.findall(pattern, page.read_text(encoding="utf-8"))]
    assert named
    for page, name in named:
        section, *path = name.split(".")
        node: object = TaskSettings() if section == "tasks" else getattr(Settings(), section)
        is_module = (ROOT / section / path[0]).is_dir() or (ROOT / section / f"{path[0]}.py").is_file()
        for part in path:
            assert is_module or hasattr(node, part), f"{page}: {name}"
            node = getattr(node, part, None)


def numbers(row: str) -> list[float]:
    return [float(cell) for cell in re.findall(r"(?<![\w.])\d*\.\d+", row)]


def test_the_break_even_table_is_the_formula() -> None:
    rows = re.findall(r"^\| (\.\d\d) \|(.+)\|$", text("docs/concepts/deciding.md"), re.MULTILINE)
    assert len(rows) == 6
    for c, cells in rows:
        for k, shown in zip((1, 2, 3, 5, 8), numbers(cells), strict=True):
            cost = 1 + k * float(c)
            below, above = (tokens_per_round([shown + d] * k)[k] for d in (-0.0051, 0.0051))
            assert below <= cost <= above, f"c={c}, k={k}"


def test_the_acceptance_tables_are_the_formulas() -> None:
    page = text("docs/concepts/acceptance.md")
    same, falling = re.findall(r"^\| accepted / proposed \|(.+)\|$", page, re.MULTILINE)
    (pooled,) = (row for row in re.findall(r"^\| α \|(.+)\|$", page, re.MULTILINE) if ".72" in row)
    for ks, alphas, ratios in [((1, 3, 5, 8), [0.8] * 8, same), ((1, 3, 5), [0.8, 0.7, 0.6, 0.5, 0.4], falling)]:
        for k, ratio in zip(ks, numbers(ratios), strict=True):
            accepted = tokens_per_round(alphas)[k] - 1
            assert accepted / k == pytest.approx(ratio, abs=0.0051)
    for k, alpha in zip((1, 3, 5), numbers(pooled), strict=True):
        falling_alphas = [0.8, 0.7, 0.6, 0.5, 0.4]
        accepted = tokens_per_round(falling_alphas)[k] - 1
        tested = tokens_per_round(falling_alphas)[k - 1]
        assert accepted / tested == pytest.approx(alpha, abs=0.0051)


def test_a_word_has_one_meaning() -> None:
    words = re.findall(r"^\| ([^|]+) \|", text("docs/glossary.md"), re.MULTILINE)
    words = [word for word in words if word not in ("word", "---")]
    assert len(words) == len(set(words))
    assert {"target", "round", "α_i", "k, `num_draft_tokens`", "probe", "segment", "acceptance ratio"} <= set(words)


def test_the_changelog_tells_of_this_version() -> None:
    assert f"\n## [{alphaloop.__version__}]" in text("CHANGELOG.md")
    assert f"alphaloop:{alphaloop.__version__}" in text("docker-compose.yml")


def test_every_test_that_guards_a_promise_exists() -> None:
    """tests/guarantees.toml names the fault and the tests of each promise of docs/concepts/guarantees.md."""
    guarantees = tomllib.loads(text("tests/guarantees.toml"))["guarantee"]
    assert len(guarantees) > 200
    for one in guarantees:
        assert one["promise"], one
        assert one["fault"], one["promise"]
        assert one["tests"], one["promise"]
        for test in one["tests"]:
            path, _, name = test.partition("::")
            name = name.rpartition("::")[2]
            assert not name or re.search(rf"(def|class) {name}\b", text(path)), test
            assert (ROOT / path).is_file(), test


def test_a_page_says_faster_only_where_its_own_figures_do() -> None:
    """The demo's table, the measured speed-ups and the log of decisions: as their screens and views would say it."""
    demo = README[README.index("<!-- demo-output -->") :].split("```")[1]
    rows = [row for row in re.findall(r"^\w.*(?:\n +.*)*", demo, re.MULTILINE) if re.search(r"\blookup\b", row)]
    assert rows
    for line in rows:
        bounds = re.findall(r"\d\.\d\d \[(\d\.\d\d) (\d\.\d\d)\]", line)
        is_measured = bool(bounds) and float(bounds[-1][0]) > 1
        assert is_measured or not re.search(r"(?<!expected )(?<!not )\bfaster\b", line), line
    for low, verdict in re.findall(r"\| +([\d.]*) \| +[\d.]* \| (\w+) *$", ASKING, re.MULTILINE):
        assert verdict != "faster" or float(low) > 1
    decided = re.findall(r"\| (\w+) +\| ([\d.]+)x vanilla expected \(([\d.]+) to", ASKING)
    assert decided
    for reason, _, low in decided:
        assert (reason == "faster") == (float(low) > 1)


def test_no_page_shows_a_rate_that_moves_with_k_without_its_k() -> None:
    """α pools positions. Where a column shows it, the same cell or a column of its own jobs' k stands beside it."""
    tables = re.findall(r"<!-- sql-output: \w+ -->\n```\n(.*?)```", ASKING, re.DOTALL)
    headers = [[cell.strip() for cell in table.splitlines()[0].split("|")] for table in tables]
    assert all("alpha" not in header for header in headers)
    demo = README[README.index("<!-- demo-output -->") :].split("```")[1]
    for line in demo.splitlines():
        for alpha in re.findall(r"\] +(\.\d\d)( k \d+)?", line):
            assert alpha[1], f"α without its k: {line}"
