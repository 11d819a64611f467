"""The deployment, as far as it can be run without a container engine: its file, and every command in it for real."""

from __future__ import annotations

import functools
import importlib.resources
import itertools
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
from alphaloop.embedded.servers import EmbeddedPostgres, binaries
from alphaloop.settings import ConsoleSettings, load_settings
from alphaloop.settings.endpoints import EndpointSettings
from alphaloop.store import schema as schema_of
from tests.fixtures.cli import Cli
from tests.fixtures.postgres import as_member
from tests.fixtures.worker import until
from worker.__main__ import main as worker_main

ROOT: Final = Path(__file__).resolve().parents[1]
DOCKERFILE: Final = (ROOT / "Dockerfile").read_text(encoding="utf-8")
TEXT: Final = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
COMPOSE: Final[dict[str, Any]] = yaml.safe_load(TEXT)
SERVICES: Final[dict[str, Any]] = COMPOSE["services"]
OURS: Final = sorted(name for name, service in SERVICES.items() if "build" in service)
VARIABLE: Final = re.compile(r"\$\{(\w+):-([^}]*)\}")
REQUIRED: Final = re.compile(r"\$\{(\w+):\?([^}]*)\}")
START_S: Final = 120.0


@functools.cache
def specification() -> Any:
    """The Compose specification's schema, as the package check-jsonschema carries it."""
    folder = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((folder / "compose-spec.json").read_text(encoding="utf-8"))
    return jsonschema.validators.validator_for(schema)(schema)


def test_the_file_follows_the_compose_specification() -> None:
    specification().validate(COMPOSE)


def test_the_guides_override_follows_it_too() -> None:
    (override,) = blocks_of("deploy", "yaml")
    specification().validate(yaml.safe_load(override))
    assert set(yaml.safe_load(override)["services"]) <= set(SERVICES)


def test_the_schema_refuses_a_misspelt_key() -> None:
    with pytest.raises(jsonschema.ValidationError, match="depend_on"):
        specification().validate({"services": {"a": {"image": "a", "depend_on": ["b"]}}})


def example() -> dict[str, str]:
    """The variables of .env.example."""
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def with_values(text: str, **values: str) -> str:
    """A text of the file with its variables replaced: by these, else by their defaults."""
    text = VARIABLE.sub(lambda found: values.get(found[1], found[2]), text)
    return REQUIRED.sub(lambda found: values[found[1]], text)


#: What a filled .env holds.
GIVEN: Final = {name: value or "secret" for name, value in example().items()}


def test_every_variable_is_documented_with_its_default() -> None:
    required = {name for name, _ in REQUIRED.findall(TEXT)}
    values = example()
    passwords = {name: "" for name in required if "PASSWORD" in name}
    own_servers = {"KAFKA_BOOTSTRAP_SERVERS": "kafka:9092", "DATABASE_ADDRESS": "postgres:5432/alphaloop"}
    assert required == {*passwords, *own_servers}, "a stack without a profile's server says so before it starts"
    assert values.pop("COMPOSE_PROFILES") == "kafka,postgres"
    assert dict(VARIABLE.findall(TEXT)) | passwords | own_servers == values
    assert TEXT.count("${") == len(VARIABLE.findall(TEXT)) + len(REQUIRED.findall(TEXT)), "an undocumented variable"


def test_passwords_have_no_default_and_their_lack_is_told_with_the_way_out() -> None:
    required = {name: told for name, told in REQUIRED.findall(TEXT) if "PASSWORD" in name}
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
def test_every_service_is_pinned_restarted_watched_and_has_a_limit_of_memory(name: str) -> None:
    service = SERVICES[name]
    image, _, tag = service["image"].rpartition(":")
    assert image
    assert re.search(r"\d", tag), "a tag that names a version"
    ends = name in ("migrate", "logins") or name.startswith("check-")
    assert service["restart"] == ("on-failure:5" if ends else "unless-stopped")
    assert ("healthcheck" in service) == (not ends)
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    assert re.fullmatch(r"\d+[mg]", with_values(service["deploy"]["resources"]["limits"]["memory"]))


def test_mounts_exist() -> None:
    mounts = [mount.split(":")[0] for service in SERVICES.values() for mount in service.get("volumes", ())]
    assert {mount for mount in mounts if not mount.startswith(".")} == set(COMPOSE["volumes"])
    assert all((ROOT / mount).is_dir() for mount in mounts if mount.startswith("."))


def test_a_worker_is_given_longer_than_it_needs_to_drain() -> None:
    worker = tomllib.loads((ROOT / "configs" / "worker.toml").read_text(encoding="utf-8"))["worker"]
    assert float(SERVICES["worker"]["stop_grace_period"].removesuffix("s")) > worker["drain_s"]


def test_the_image_holds_what_its_commands_need() -> None:
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()}
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored, f"{name} is kept out of the build's context"
    assert copied >= {"alphaloop", "migrations", "scheduler", "worker", "requirements.lock"}
    assert "configs" not in copied
    assert "!configs" not in ignored, "settings are mounted: what lies there may be secret, and gets into no image"
    assert DOCKERFILE.rindex("--editable .\n") > DOCKERFILE.rindex("\nCOPY "), "installed once the sources are there"
    assert re.search(r"^USER [1-9]\d*$", DOCKERFILE, re.MULTILINE), "by number: Kubernetes can tell that it is not root"
    (command,) = re.findall(r"^CMD (.+)$", DOCKERFILE, re.MULTILINE)
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


def test_the_migrations_run_and_run_again(
    empty_database_url: SecretStr, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = empty_database_url.get_secret_value()
    settings = environment("migrate", DATABASE_URL=url, ALPHALOOP_DATA_DIR=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    command = runnable(SERVICES["migrate"]["command"])
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("DATABASE_URL", url)
    again = cli(*command[3:])
    assert again.code == 0, again.err
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT count(*) FROM jobs").fetchone() == (0,)


def test_only_the_migrations_connect_as_owner() -> None:
    users = {
        name: make_url(with_values(service["environment"]["DATABASE_URL"], **GIVEN)).username
        for name, service in SERVICES.items()
        if "DATABASE_URL" in service.get("environment", ())
    }
    workers = dict.fromkeys(("worker", "worker-vllm", "worker-llama-cpp"), "worker")
    assert users == {"migrate": "alphaloop", "scheduler": "scheduler", **workers}


def test_the_console_is_reached_from_this_machine_with_a_password_and_its_own_login() -> None:
    scheduler = SERVICES["scheduler"]
    said = {name: with_values(value, **GIVEN) for name, value in scheduler["environment"].items()}
    assert scheduler["ports"] == ["127.0.0.1:${CONSOLE_PORT:-9466}:9466"]
    assert "CONSOLE_PASSWORD:?" in scheduler["environment"]["ALPHALOOP_CONSOLE__PASSWORD"]
    assert make_url(said["ALPHALOOP_CONSOLE__DATABASE_URL"]).username == "console"
    values = {name.removeprefix("ALPHALOOP_CONSOLE__").lower(): value for name, value in said.items()}
    console = ConsoleSettings.model_validate({name: values[name] for name in ("http_host", "public_url", "password")})
    assert console.http_port == 9466
    assert console.hosts is not None
    assert "localhost" in console.hosts


def make_logins(address: str, password: str, owners_password: str) -> None:
    """Run the service `logins` against the database at this address."""
    service = SERVICES["logins"]
    mount, _, target = service["volumes"][0].removesuffix(":ro").partition(":")
    program, *arguments = (
        with_values(part, DATABASE_ADDRESS=address).replace(target, str(ROOT / mount)) for part in service["command"]
    )
    passwords = {name: password for name in service["environment"] if name.endswith("_DB_PASSWORD")}
    assert len(passwords) == 4
    assert set(service["environment"]) == {"PGPASSWORD", *passwords}
    done = subprocess.run(
        [binaries() / program, *arguments],
        env=passwords | {"PGPASSWORD": owners_password},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.postgres
def test_the_logins_are_made_with_their_roles_and_made_again(memory_folder: Path) -> None:
    """On a managed server, which gives nobody a superuser, by an owner who was made as docs/guides/deploy.md says."""
    server = EmbeddedPostgres(memory_folder / "of-somebody-else", durable=False)
    try:
        admin = make_url(server.start())
        (block,) = (one for one in blocks_of("deploy", "psql") if "CREATE DATABASE" in one)
        with psycopg.connect(admin.render_as_string(hide_password=False), autocommit=True) as connection:
            connection.execute("CREATE ROLE managed LOGIN CREATEDB CREATEROLE PASSWORD 'managed'")
            connection.execute("CREATE ROLE other LOGIN SUPERUSER PASSWORD 'other'")
        # The embedded server's own names are those that the guide gives to the owner and the database.
        other = admin.set(username="other", password="other", database="template1")
        with psycopg.connect(other.render_as_string(hide_password=False), autocommit=True) as connection:
            connection.execute("DROP DATABASE alphaloop WITH (FORCE)")
            connection.execute("ALTER ROLE alphaloop RENAME TO embedded")
        managed = other.set(username="managed", password="managed")
        with psycopg.connect(managed.render_as_string(hide_password=False), autocommit=True) as connection:
            for statement in block.replace("'…'", "'owned'").strip().removesuffix(";").split(";\n"):
                connection.execute(statement.encode())
        address = f"{admin.host}:{admin.port}/alphaloop?connect_timeout=10"
        owner = admin.set(username="alphaloop", password="owned", database="alphaloop")
        schema_of.upgrade(owned := SecretStr(owner.render_as_string(hide_password=False)))
        assert schema_of.grant_to_roles(owned) == []
        for password in ("first", "second"):
            make_logins(address, password, "owned")
            for login in ("worker", "scheduler", "reader", "console"):
                own = owner.set(username=login, password=password).render_as_string(hide_password=False)
                with psycopg.connect(own) as connection:
                    roles = connection.execute(
                        "SELECT name FROM unnest(%s::text[]) AS name WHERE pg_has_role(name, 'MEMBER')",
                        (["alphaloop_worker", "alphaloop_scheduler", "alphaloop_reader"],),
                    ).fetchall()
                expected = ["worker", "scheduler"] if login == "console" else [login]
                assert roles == [(f"alphaloop_{role}",) for role in expected]
    finally:
        server.stop()


def blocks_of(page: str, language: str) -> list[str]:
    guide = (ROOT / "docs" / "guides" / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", [*OURS, "logins"])
def test_settings_are_mounted_where_the_image_looks_for_them(name: str) -> None:
    (folder,) = re.findall(r"ALPHALOOP_CONFIGS=(\S+)", DOCKERFILE)
    assert f"./configs:{folder}:ro" in SERVICES[name]["volumes"]
    assert folder not in re.findall(r"mkdir .*|install -d .*", DOCKERFILE), "a missing mount has to be found out"


def test_an_image_without_the_mount_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And does not start with settings that nobody wrote, which would refuse every job as one of an unknown task."""
    assert SERVICES["worker"]["command"] == ["python", "-m", "worker"]
    monkeypatch.chdir(tmp_path)
    changes = {"ALPHALOOP_CONFIGS": str(tmp_path / "missing"), "ALPHALOOP_DATA_DIR": str(tmp_path)}
    for name, value in environment("worker", **changes).items():
        monkeypatch.setenv(name, value)
    assert worker_main([]) == 1
    assert f"found nothing at {tmp_path / 'missing'}" in caplog.text


@pytest.mark.parametrize(
    "profiles", [{"kafka", "postgres"}, {"kafka"}, {"postgres"}, set(), {"vllm"}, {"llama-cpp", "postgres"}]
)
def test_servers_of_ones_own_are_two_variables_and_a_profile_less(
    profiles: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What starts depends on nothing that does not, names no other server, and reads the addresses as they were set."""
    started = {
        name: service
        for name, service in SERVICES.items()
        if "profiles" not in service or profiles.intersection(service["profiles"])
    }
    assert {"kafka", "postgres"} & set(started) == {"kafka", "postgres"} & profiles
    given = GIVEN | {
        "KAFKA_BOOTSTRAP_SERVERS": "kafka:9092" if "kafka" in profiles else "b-1.example.com:9096,b-2.example.com:9096",
        "DATABASE_ADDRESS": "postgres:5432/alphaloop"
        if "postgres" in profiles
        else "db.example.com:5432/jobs?sslmode=verify-full&sslrootcert=/etc/alphaloop/ca.pem",
    }
    for name, service in started.items():
        for other, rule in service.get("depends_on", {}).items():
            assert other in started or rule["required"] is False, f"{name} cannot start without {other}"
        said = with_values(json.dumps([service.get("environment"), service.get("command")]), **given)
        for server in {"kafka", "postgres"} - profiles:
            assert not re.search(rf"\b{server}:\d", said), f"{name} goes to {server}"
    for name in sorted(set(OURS) & set(started)):
        with monkeypatch.context() as patch:
            for variable, value in SERVICES[name]["environment"].items():
                patch.setenv(variable, with_values(str(value), **given))
            found = load_settings(ROOT / "configs")
        assert found.kafka.bootstrap_servers == given["KAFKA_BOOTSTRAP_SERVERS"]
        if found.postgres.url is not None:
            url = make_url(found.postgres.url.get_secret_value())
            wanted = make_url(f"postgresql://{given['DATABASE_ADDRESS']}")
            assert url == wanted.set(username=url.username, password=url.password)


def test_further_settings_are_variables_of_one_file() -> None:
    """Such as a login at Kafka. Compose would pass none of .env into a container by itself."""
    for name in OURS:
        assert SERVICES[name]["env_file"] == [{"path": "settings.env", "required": False}]
    assert "/settings.env" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    (block,) = (one for one in blocks_of("deploy", "sh") if "ALPHALOOP_KAFKA__SASL_PASSWORD" in one)
    assert block.startswith("# settings.env")
    with pytest.MonkeyPatch.context() as patch:
        for line in block.splitlines()[1:]:
            patch.setenv(*line.split("=", 1))
        kafka = load_settings(ROOT / "configs").kafka
    assert kafka.security_protocol == "SASL_SSL"
    assert str(kafka.ssl_ca_location) == "/etc/alphaloop/ca.pem"


def test_vllm_gets_into_no_environment_with_our_torch() -> None:
    """It pins another torch: whoever installs it beside ours has neither."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert not any("vllm" in one for wanted in project["optional-dependencies"].values() for one in wanted)
    (installed,) = re.findall(r"--editable '\.\[(.*)\]'", DOCKERFILE)
    assert "decode" in installed.split(",")
    (line,) = re.findall(r"^.*pip install [^\n]*vllm.*$", DOCKERFILE, re.MULTILINE)
    assert re.search(r"python -m venv (\S*vllm) .*\1/bin/pip install", line)
    assert all("build" not in service for service in SERVICES.values() if "vllm" in service["image"])
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            for before, line in itertools.pairwise(["", *block.splitlines()]):
                if re.search(r"pip install .*vllm", line):
                    assert re.search(r"python3 -m venv \S*vllm", before + line), (
                        f"{page}: {line}: into which environment?"
                    )


def test_an_image_for_gpus_says_which_driver_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The build names the CUDA release, NVIDIA's runtime holds a driver to it, and the guide says its number."""
    assert "NVIDIA_REQUIRE_CUDA=${CUDA:+cuda>=$CUDA}" in DOCKERFILE
    assert SERVICES["worker"]["build"]["args"]["CUDA"] == "${CUDA:-}"
    (release, driver) = re.findall(r"--build-arg CUDA=(\S+).*driver (\d+)", "\n".join(blocks_of("deploy", "sh")))[0]
    example_lines = (ROOT / ".env.example").read_text(encoding="utf-8")
    assert f"{release}, the CUDA release of the image's torch, which needs driver {driver} or newer" in example_lines
    # The build ends where the release that was named is not that of the torch that was installed: here, of none.
    (program,) = re.findall(r'python -c "(import sys, torch;.*?)" "\$CUDA"', DOCKERFILE, re.DOTALL)
    monkeypatch.setattr(sys, "argv", ["-c", "99.9"])
    with pytest.raises(SystemExit, match=r"the build argument CUDA is 99\.9"):
        exec(program.replace("\\\n", ""), {})


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
        while subprocess.run(runnable(check[1:], port=port), capture_output=True, timeout=30).returncode:
            assert process.poll() is None, log.read_text(encoding="utf-8")
            assert monotonic() < deadline, log.read_text(encoding="utf-8")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text(encoding="utf-8")
    finally:
        process.kill()
        process.wait()
    for line in log.read_text(encoding="utf-8").splitlines():
        assert isinstance(json.loads(line), dict), "the deployment logs JSON"


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
