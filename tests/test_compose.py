"""The deployment, as far as it can be run without a container engine: its file, and every command in it for real."""

from __future__ import annotations

import importlib.resources
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Final
from urllib.parse import urlsplit

import jsonschema
import psycopg
import pytest
import yaml
from pydantic import SecretStr
from sqlalchemy import make_url

from alphaloop.cli.children import LogFollower, field_of
from alphaloop.embedded.postgres import binaries
from alphaloop.settings import ConsoleSettings, load_settings
from alphaloop.settings.endpoint import EndpointSettings
from tests.fixtures import server_replies
from tests.fixtures.inference_server import listening_beside
from tests.fixtures.postgres import as_member
from tests.fixtures.worker import until
from tests.integration.test_check_server import speaking

ROOT: Final = Path(__file__).resolve().parents[1]
TEXT: Final = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
COMPOSE: Final[dict[str, Any]] = yaml.safe_load(TEXT)
SERVICES: Final[dict[str, Any]] = COMPOSE["services"]
OURS: Final = sorted(name for name, service in SERVICES.items() if "build" in service)
VARIABLE: Final = re.compile(r"\$\{(\w+):-([^}]*)\}")
REQUIRED: Final = re.compile(r"\$\{(\w+):\?([^}]*)\}")
START_S: Final = 120.0


def schema() -> dict[str, Any]:
    """The Compose specification's schema, as the package check-jsonschema carries it."""
    folder = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    return dict(json.loads((folder / "compose-spec.json").read_text(encoding="utf-8")))


def test_the_file_follows_the_compose_specification() -> None:
    jsonschema.validate(COMPOSE, schema())


@pytest.mark.parametrize("page", ["deploy", "gpus"])
def test_the_guides_overrides_follow_it_too(page: str) -> None:
    guide = (ROOT / "docs" / "guides" / f"{page}.md").read_text(encoding="utf-8")
    (override,) = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    jsonschema.validate(yaml.safe_load(override), schema())
    assert set(yaml.safe_load(override)["services"]) <= set(SERVICES)


def test_the_schema_refuses_a_misspelt_key() -> None:
    with pytest.raises(jsonschema.ValidationError, match="depend_on"):
        jsonschema.validate({"services": {"a": {"image": "a", "depend_on": ["b"]}}}, schema())


def example() -> dict[str, str]:
    """The variables of .env.example."""
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_every_variable_is_documented_with_its_default() -> None:
    required = dict.fromkeys(name for name, _ in REQUIRED.findall(TEXT))
    assert dict(VARIABLE.findall(TEXT)) | dict.fromkeys(required, "") == example()
    assert TEXT.count("${") == len(VARIABLE.findall(TEXT)) + len(REQUIRED.findall(TEXT)), "an undocumented variable"


def test_passwords_have_no_default_and_their_lack_is_told_with_the_way_out() -> None:
    required = dict(REQUIRED.findall(TEXT))
    assert {name for name in example() if "PASSWORD" in name} == set(required)
    assert all("cp .env.example .env" in told for told in required.values())
    told = [line for line in TEXT.splitlines() if re.search("password|secret", line, re.IGNORECASE)]
    assert all("${" in line for line in told if not line.lstrip().startswith("#")), "a password in the file itself"


def test_dependencies_wait_for_what_they_need() -> None:
    for name, service in SERVICES.items():
        for other, rule in service.get("depends_on", {}).items():
            if rule["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[other], f"{name} waits for the health of {other}"
            else:
                assert rule["condition"] == "service_completed_successfully"
                assert SERVICES[other]["restart"].startswith("on-failure")
    for name in ("worker", "scheduler"):
        assert SERVICES[name]["depends_on"]["logins"]["condition"] == "service_completed_successfully"
    assert SERVICES["logins"]["depends_on"]["migrate"]["condition"] == "service_completed_successfully"


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_service_is_pinned_restarted_and_watched(name: str) -> None:
    service = SERVICES[name]
    image, _, tag = service["image"].rpartition(":")
    assert image
    assert re.search(r"\d", tag), "a tag that names a version"
    ends = name in ("migrate", "logins") or name.startswith("check-")
    assert service["restart"] == ("on-failure:5" if ends else "unless-stopped")
    assert ("healthcheck" in service) == (not ends)
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_mounts_exist() -> None:
    mounts = [mount.split(":")[0] for service in SERVICES.values() for mount in service.get("volumes", ())]
    assert {mount for mount in mounts if not mount.startswith(".")} == set(COMPOSE["volumes"])
    assert all((ROOT / mount).is_dir() for mount in mounts if mount.startswith("."))


def test_a_worker_is_given_longer_than_it_needs_to_drain() -> None:
    worker = tomllib.loads((ROOT / "configs" / "worker.toml").read_text(encoding="utf-8"))["worker"]
    assert float(SERVICES["worker"]["stop_grace_period"].removesuffix("s")) > worker["drain_s"]


def test_the_image_holds_what_its_commands_need() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE) for name in line.split()}
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored, f"{name} is kept out of the build's context"
    assert copied >= {"alphaloop", "configs", "migrations", "scheduler", "worker", "requirements.lock"}
    assert dockerfile.rindex("--editable .\n") > dockerfile.rindex("\nCOPY "), "installed once the sources are there"
    assert re.search(r"^USER (?!root)\w+$", dockerfile, re.MULTILINE)
    (command,) = re.findall(r"^CMD (.+)$", dockerfile, re.MULTILINE)
    assert json.loads(command) == SERVICES["worker"]["command"], "exec form, the worker by default"


def runnable(command: Sequence[str], *, port: int | None = None) -> list[str]:
    """A command of the file as it runs here: this interpreter, the console script as its module, another port."""
    script = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]["alphaloop"]
    heads = {"python": [sys.executable], "alphaloop": [sys.executable, "-m", script.split(":")[0]]}
    arguments = [re.sub(r":94\d\d/", f":{port}/", argument) if port else argument for argument in command[1:]]
    return [*heads[command[0]], *arguments]


def environment(service: str, **changes: str) -> dict[str, str]:
    """The service's own environment, its addresses and folders changed to ones that exist here."""
    said = {name: str(value) for name, value in SERVICES[service]["environment"].items()}
    own = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR")}
    return {**own, **said, **changes}


def test_the_migrations_run_and_run_again(empty_database_url: SecretStr, tmp_path: Path) -> None:
    url = empty_database_url.get_secret_value()
    settings = environment("migrate", DATABASE_URL=url, ALPHALOOP_DATA_DIR=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    for _ in range(2):
        done = subprocess.run(
            runnable(SERVICES["migrate"]["command"]), cwd=ROOT, env=settings, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT count(*) FROM jobs").fetchone() == (0,)


def test_only_the_migrations_connect_as_owner() -> None:
    users = {
        name: make_url(service["environment"]["DATABASE_URL"]).username
        for name, service in SERVICES.items()
        if "DATABASE_URL" in service.get("environment", ())
    }
    workers = dict.fromkeys(("worker", "worker-vllm", "worker-llama-cpp"), "worker")
    assert users == {"migrate": "alphaloop", "scheduler": "scheduler", **workers}


def test_the_console_is_reached_from_this_machine_with_a_password_and_its_own_login() -> None:
    scheduler = SERVICES["scheduler"]
    said = scheduler["environment"]
    assert scheduler["ports"] == ["127.0.0.1:${CONSOLE_PORT:-9466}:9466"]
    assert "CONSOLE_PASSWORD:?" in said["ALPHALOOP_CONSOLE__PASSWORD"]
    assert make_url(said["ALPHALOOP_CONSOLE__DATABASE_URL"]).username == "console"
    values = {
        name.removeprefix("ALPHALOOP_CONSOLE__").lower(): VARIABLE.sub(r"\2", text) for name, text in said.items()
    }
    console = ConsoleSettings.model_validate({name: values[name] for name in ("http_host", "public_url", "password")})
    assert console.http_port == 9466
    assert console.hosts is not None
    assert "localhost" in console.hosts


@pytest.mark.postgres
def test_the_logins_are_made_with_their_roles_and_made_again(
    database_url: SecretStr,
) -> None:
    url = make_url(database_url.get_secret_value())
    service = SERVICES["logins"]
    mount, _, target = service["volumes"][0].removesuffix(":ro").partition(":")
    program, *arguments = (part.replace(target, str(ROOT / mount)) for part in service["command"])
    for password in ("first", "second"):
        passwords = {name: password for name in service["environment"] if name.endswith("_DB_PASSWORD")}
        assert len(passwords) == 4
        place = {
            "PGHOST": str(url.host),
            "PGPORT": str(url.port),
            "PGUSER": str(url.username),
            "PGDATABASE": str(url.database),
            "PGPASSWORD": str(url.password),
        }
        assert set(service["environment"]) == {*place, *passwords} - {"PGPORT"}
        done = subprocess.run(
            [binaries() / program, *arguments], env=place | passwords, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
        for login in ("worker", "scheduler", "reader", "console"):
            own = url.set(username=login, password=password).render_as_string(hide_password=False)
            with psycopg.connect(own) as connection:
                roles = connection.execute(
                    "SELECT name FROM unnest(%s::text[]) AS name WHERE pg_has_role(name, 'MEMBER')",
                    (["alphaloop_worker", "alphaloop_scheduler", "alphaloop_reader"],),
                ).fetchall()
            expected = ["worker", "scheduler"] if login == "console" else [login]
            assert roles == [(f"alphaloop_{role}",) for role in expected]


@pytest.fixture
def service_environment(
    request: pytest.FixtureRequest,
    kafka_broker: str,
    postgres_server: str,
    database_url: SecretStr,
    tmp_path: Path,
) -> dict[str, str]:
    """What the service named by the test's parameter gets, with real servers behind it and the rights of its role."""
    service = request.getfixturevalue("service")
    login = as_member(postgres_server, database_url, f"alphaloop_{service}")
    changes = {
        "KAFKA_BOOTSTRAP_SERVERS": kafka_broker,
        "DATABASE_URL": login.get_secret_value(),
        "ALPHALOOP_DATA_DIR": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path),
        "HF_HOME": str(tmp_path),
        "MPLCONFIGDIR": str(tmp_path),
        f"ALPHALOOP_{service.upper()}__HTTP_HOST": "127.0.0.1",
        f"ALPHALOOP_{service.upper()}__HTTP_PORT": "0",
    }
    if service == "scheduler":
        changes["ALPHALOOP_CONSOLE__HTTP_HOST"] = "127.0.0.1"
        changes["ALPHALOOP_CONSOLE__HTTP_PORT"] = "0"
        changes["ALPHALOOP_CONSOLE__PUBLIC_URL"] = "http://localhost:9466"
        changes["ALPHALOOP_CONSOLE__DATABASE_URL"] = login.get_secret_value()
    if service == "worker":
        changes["ALPHALOOP_MODELS__TARGET__SOURCE"] = str(request.getfixturevalue("tiny_models")["llama"])
        changes["ALPHALOOP_MODELS__TARGET__DTYPE"] = "float32"
        # What no decision can be taken without is measured, and no more.
        changes["ALPHALOOP_WORKER__CALIBRATION_SAMPLES"] = "1"
        changes["ALPHALOOP_WORKER__CALIBRATION_CONTEXTS"] = "[64]"
        changes["ALPHALOOP_WORKER__CALIBRATION_BUDGET_S"] = "0"
    return environment(service, **changes)


@pytest.mark.kafka
@pytest.mark.postgres
@pytest.mark.slow
@pytest.mark.parametrize("service", ["worker", "scheduler"])
def test_the_process_comes_up_healthy_and_stops_on_sigterm(
    service: str, service_environment: dict[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "process.log"
    check = SERVICES[service]["healthcheck"]["test"]
    assert check[0] == "CMD"
    command = runnable(SERVICES[service]["command"])
    with log.open("wb") as sink:
        process = subprocess.Popen(command, cwd=ROOT, env=service_environment, stdout=sink, stderr=sink)
    try:
        deadline = monotonic() + START_S
        # The check is a process too: while the service starts, one after another would take the processor from it.
        ready, follower = f"{service}_ready", LogFollower(log, from_start=True)
        until(lambda: process.poll() is not None or follower.find(ready) is not None, ready, START_S)
        line = follower.find(ready)
        assert line is not None, log.read_text(encoding="utf-8")
        port = urlsplit(field_of(line, "metrics")).port
        while not _healthy(runnable(check[1:], port=port)):
            assert process.poll() is None, log.read_text(encoding="utf-8")
            assert monotonic() < deadline, log.read_text(encoding="utf-8")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text(encoding="utf-8")
    finally:
        process.kill()
        process.wait()
    for line in log.read_text(encoding="utf-8").splitlines():
        assert isinstance(json.loads(line), dict), "the deployment logs JSON"


def _healthy(check: Sequence[str]) -> bool:
    return subprocess.run(check, capture_output=True, timeout=30).returncode == 0


def endpoints(service: str) -> dict[str, EndpointSettings]:
    """The inference servers that a service's environment names, as alphaloop reads them."""
    said = {name: VARIABLE.sub(r"\2", value) for name, value in environment(service).items()}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in said.items():
            patch.setenv(name, value)
        models = load_settings(ROOT / "configs").models
    assert models.target.engine == "server"
    return {name: one for name, one in models.endpoints.items() if isinstance(one, EndpointSettings)}


@pytest.mark.parametrize("service", ["check-vllm", "check-llama-cpp"])
def test_a_check_asks_each_server_of_its_profile_by_name(service: str) -> None:
    (profile,) = SERVICES[service]["profiles"]
    servers = {name for name, other in SERVICES.items() if other.get("profiles") == [profile] and "build" not in other}
    assert set(SERVICES[service]["depends_on"]) == servers
    asked = endpoints(service)
    assert {urlsplit(endpoint.url).hostname for endpoint in asked.values()} == servers
    assert {endpoint.kind for endpoint in asked.values()} == {profile.replace("-", "_")}
    assert re.findall(r"check-server[ ,']+(\w+)", str(SERVICES[service]["command"])) == list(asked)


@pytest.mark.parametrize("service", ["worker-vllm", "worker-llama-cpp"])
def test_a_worker_of_a_profile_sends_its_jobs_to_the_servers_that_were_checked(service: str) -> None:
    """It is the worker of the stack but for its environment; k is what the server was started with."""
    told = SERVICES[service]
    same = ("command", "image", "build", "healthcheck", "restart", "stop_grace_period", "volumes", "read_only")
    assert {key: told[key] for key in same} == {key: SERVICES["worker"][key] for key in same}
    checked = SERVICES[service.replace("worker", "check")]
    assert endpoints(service) == endpoints(service.replace("worker", "check"))
    assert told["depends_on"] == {**SERVICES["worker"]["depends_on"], **checked["depends_on"]}
    assert told["networks"] == {"default": {"aliases": ["worker"]}}, "the name at which Prometheus looks for workers"
    for endpoint in endpoints(service).values():
        command = " ".join(SERVICES[str(urlsplit(endpoint.url).hostname)]["command"])
        told_k = re.findall(r'"num_speculative_tokens": (\d+)', command)
        assert [str(endpoint.num_draft_tokens)] == (told_k or ["None"])
        assert str(endpoint.max_requests) in (re.findall(r"--parallel (\d+)", command) or ["16"])


def test_a_check_runs(tmp_path: Path) -> None:
    """The command of one, over a server that answers in its kind's form; that of the other asks two in the same way."""
    service = "check-llama-cpp"
    with listening_beside(speaking(server_replies.llama_cpp())) as server:
        settings = environment(service, ALPHALOOP_DATA_DIR=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
        settings |= {name: server.url for name in settings if name.endswith("__URL")}
        command = runnable(SERVICES[service]["command"])
        done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "counts" in done.stdout


def test_the_check_of_a_pair_fails_if_one_of_them_does() -> None:
    shell, option, script = SERVICES["check-vllm"]["command"]
    assert (shell, option) == ("sh", "-c")
    assert script == " && ".join(f"alphaloop check-server {name}" for name in endpoints("check-vllm"))


def test_vllm_is_started_with_the_options_that_make_it_tell_its_counts() -> None:
    plain, ngram = (SERVICES[name]["command"] for name in ("vllm-plain", "vllm-ngram"))
    assert {"--enable-per-request-metrics", "--per-request-spec-decode-metrics=detailed"} <= set(plain)
    (drafts,) = (argument for argument in ngram if argument not in plain)
    config = json.loads(drafts.removeprefix("--speculative-config="))
    assert config["method"] == "ngram"
    assert [argument for argument in ngram if argument != drafts] == plain, "the pair differs in its drafts only"


def test_profiles_start_nothing_unless_they_are_asked_for() -> None:
    optional = {name for name, service in SERVICES.items() if "profiles" in service}
    vllm = {"vllm-plain", "vllm-ngram", "check-vllm", "worker-vllm"}
    assert optional == vllm | {"llama-cpp", "check-llama-cpp", "worker-llama-cpp"}
    needed = {other for name in SERVICES.keys() - optional for other in SERVICES[name].get("depends_on", {})}
    assert not needed & optional


def test_no_command_is_left_out() -> None:
    """Who adds a service of ours adds the test that runs its command."""
    assert set(OURS) == {
        *("migrate", "scheduler", "worker"),
        *("check-llama-cpp", "check-vllm", "worker-llama-cpp", "worker-vllm"),
    }
