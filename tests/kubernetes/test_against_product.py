"""The manifests fit the product: its settings, commands, ports and probes, the time to drain, and the image."""

from __future__ import annotations

import copy
import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
import yaml
from prometheus_client import CollectorRegistry

from alphaloop.errors import ConfigError
from alphaloop.inside_vllm.interface import TESTED
from alphaloop.kafka.consumer import _member_config
from alphaloop.liveness import MetricsServer
from alphaloop.messages.topics import jobs_topic
from alphaloop.settings import EndpointSettings, KafkaSettings, Settings, load_settings
from alphaloop.settings.load import ENV_PREFIX, FILES, PLAIN_ENV
from scheduler.metrics import KafkaLag, SchedulerMetrics
from tests.chaos.asking import ask
from tests.kubernetes.kustomize import Resource, containers, load, mine, render

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / "configs" / "kubernetes"
BASE: Final = render(FOLDER / "base")
EXAMPLE: Final = render(mine())
MIGRATE: Final = render(FOLDER / "migrate")
TARGETS: Final = render(FOLDER / "base", components=[FOLDER / name for name in ("gpu", "keda", "targets")])
IN_VLLM: Final = render(FOLDER / "base", components=[FOLDER / name for name in ("gpu", "keda", "targets", "vllm")])
SERVED: Final = render(FOLDER / "base", components=[FOLDER / "servers"])
COMPOSE: Final[dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
DOCKERFILE: Final = (ROOT / "Dockerfile").read_text(encoding="utf-8")
#: Time beyond the drain: claims are given back, results published, the group is left.
LEAVING_S: Final = 60
#: What a Secret of the user's holds, by key.
SECRETS: Final = {
    "DATABASE_URL": "postgresql://one:secret@db.example.com/alphaloop",
    "ALPHALOOP_CONSOLE__DATABASE_URL": "postgresql://two:secret@db.example.com/alphaloop",
    "ALPHALOOP_CONSOLE__PASSWORD": "secret",
}


def one(resources: list[Resource], kind: str, name: str) -> Resource:
    (found,) = (each for each in resources if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def process(resources: list[Resource], name: str) -> dict[str, Any]:
    """The only container of a process's pod."""
    (container,) = containers(one(resources, "Job" if name == "migrate" else "Deployment", name))
    return container


def variables(resources: list[Resource], name: str) -> dict[str, str]:
    """The environment of a process, with samples for what a Secret holds."""
    container = process(resources, name)
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        if "configMapRef" in source:
            found |= one(resources, "ConfigMap", source["configMapRef"]["name"])["data"]
    for variable in container["env"]:
        secret = variable.get("valueFrom", {}).get("secretKeyRef")
        found[variable["name"]] = SECRETS[secret["key"]] if secret else variable["value"]
    return found


def settings(resources: list[Resource], name: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """What the process reads at its start; an unknown variable is refused there."""
    for variable in list(os.environ):
        if variable.startswith(ENV_PREFIX) or variable in PLAIN_ENV:
            monkeypatch.delenv(variable)
    for variable, value in variables(resources, name).items():
        monkeypatch.setenv(variable, value)
    return load_settings(ROOT / "configs")


PROCESSES: Final = [
    pytest.param(resources, name, id=f"{name} of {where}")
    for where, resources in (("base", BASE), ("example", EXAMPLE))
    for name in ("worker", "scheduler", "console")
] + [
    pytest.param(MIGRATE, "migrate", id="migrate"),
    pytest.param(SERVED, "worker", id="worker of servers"),
    *(pytest.param(IN_VLLM, name, id=f"{name} with vLLM") for name in ("worker", "worker-large")),
]


@pytest.mark.parametrize(("resources", "name"), PROCESSES)
def test_every_variable_is_a_setting(resources: list[Resource], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings(resources, name, monkeypatch)
    assert found.postgres.url.get_secret_value() == SECRETS["DATABASE_URL"]
    others = {v for v in variables(resources, name) if not v.startswith(ENV_PREFIX) and v not in PLAIN_ENV}
    assert others <= set(COMPOSE["worker"]["environment"]), "neither a setting nor one of the Compose stack's"


def test_each_process_has_a_login_of_its_own() -> None:
    """A Secret is named as the process that alone uses it."""
    for name in ("worker", "scheduler", "console", "migrate"):
        container = process(MIGRATE if name == "migrate" else BASE, name)
        used = {v["valueFrom"]["secretKeyRef"]["name"] for v in container["env"] if "valueFrom" in v}
        assert used == {name}


def test_the_processes_are_reached_where_the_pods_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("worker", "scheduler", "console"):
        found = settings(BASE, name, monkeypatch)
        dials = found.worker if name == "worker" else found.scheduler
        ports = {port["name"]: port["containerPort"] for port in process(BASE, name)["ports"]}
        assert ports.pop("metrics") == dials.http_port
        assert dials.http_host == "0.0.0.0"
        assert found.console.is_on == (name != "scheduler")
        if name == "console":
            assert ports.pop("console") == found.console.http_port
            assert found.console.http_host == "0.0.0.0"
            assert found.console.hosts is not None
            assert found.console.password is not None
        assert not ports


@pytest.mark.parametrize("name", ["worker", "scheduler", "console", "migrate"])
def test_commands_are_those_of_the_compose_stack(name: str) -> None:
    """tests/test_compose.py runs them."""
    service = {"console": "scheduler"}.get(name, name)
    assert process(MIGRATE if name == "migrate" else BASE, name)["command"] == COMPOSE[service]["command"]


def test_probes_ask_for_paths_that_are_served() -> None:
    endpoint = MetricsServer("127.0.0.1", 0, CollectorRegistry(), healthy=lambda: None, ready=lambda: "starting")
    try:
        for name in ("worker", "scheduler", "console"):
            container = process(BASE, name)
            for probe, status in (("livenessProbe", 200), ("readinessProbe", 503)):
                get = container[probe]["httpGet"]
                assert get["port"] == "metrics"
                assert ask(urlsplit(endpoint.url).port or 0, get["path"].lstrip("/"), 30.0)[0] == status
            assert "startupProbe" not in container, "healthy from the start, however long that takes"
    finally:
        endpoint.close()


@pytest.mark.parametrize(("resources", "name"), PROCESSES)
def test_variables_of_services_are_kept_out(resources: list[Resource], name: str) -> None:
    kind = "Job" if name == "migrate" else "Deployment"
    assert one(resources, kind, name)["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_a_service_named_after_the_product_would_stop_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for `enableServiceLinks: false`."""
    monkeypatch.setenv("ALPHALOOP_CONSOLE_SERVICE_HOST", "10.0.0.7")
    with pytest.raises(ConfigError, match="ALPHALOOP_CONSOLE_SERVICE_HOST"):
        load_settings(ROOT / "configs")


@pytest.mark.parametrize("resources", [BASE, EXAMPLE], ids=["base", "example"])
def test_a_worker_is_given_longer_than_it_needs_to_drain(
    resources: list[Resource], monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = one(resources, "Deployment", "worker")["spec"]["template"]["spec"]
    drain_s = settings(resources, "worker", monkeypatch).worker.drain_s
    assert pod["terminationGracePeriodSeconds"] >= drain_s + LEAVING_S


def test_a_worker_uses_as_many_threads_as_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for resources in (BASE, EXAMPLE):
        threads = settings(resources, "worker", monkeypatch).models.target.num_threads
        assert str(threads) == process(resources, "worker")["resources"]["requests"]["cpu"]


def test_the_image_is_the_dockerfiles() -> None:
    (uid,) = re.findall(r"^RUN useradd .*--uid (\d+)", DOCKERFILE, re.MULTILINE)
    (data_dir,) = re.findall(r"ALPHALOOP_DATA_DIR=(\S+)", DOCKERFILE)
    (configs,) = re.findall(r"ALPHALOOP_CONFIGS=(\S+)", DOCKERFILE)
    for resources, name in ((EXAMPLE, "worker"), (EXAMPLE, "scheduler"), (EXAMPLE, "console"), (MIGRATE, "migrate")):
        pod = one(resources, "Job" if name == "migrate" else "Deployment", name)["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsUser"] == int(uid)
        mounts = {mount["mountPath"] for mount in process(resources, name)["volumeMounts"]}
        assert "/tmp" in mounts
        if name != "migrate":
            assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"] == int(uid)
            assert mounts >= {data_dir, configs}
        else:
            assert variables(resources, name)["ALPHALOOP_CONFIGS"] in mounts, "without a folder no process starts"
        for value in variables(resources, name).values():
            if value.startswith("/"):
                assert any(f"{value}/".startswith(f"{mount}/") for mount in mounts), f"{value} is read-only or missing"


def test_the_settings_are_the_files_of_the_repository() -> None:
    """Copied by the guide's command, so that there is one of each: all that is read, and nothing else."""
    said = one(EXAMPLE, "ConfigMap", "configs")["data"]
    assert said == {f"{name}.toml": (ROOT / "configs" / f"{name}.toml").read_text(encoding="utf-8") for name in FILES}
    for name in ("worker", "scheduler", "console"):
        pod = one(EXAMPLE, "Deployment", name)["spec"]["template"]["spec"]
        (volume,) = (each for each in pod["volumes"] if each["name"] == "configs")
        assert volume["configMap"] == {"name": "configs"}, "not optional: without settings nothing starts"


def test_the_policy_lets_the_worker_reach_kafka_and_postgres(monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings(BASE, "worker", monkeypatch)
    policy = one(BASE, "NetworkPolicy", "alphaloop")
    (anywhere,) = policy["spec"]["egress"]
    assert "to" not in anywhere
    kafka = {int(address.rpartition(":")[2]) for address in found.kafka.bootstrap_servers.split(",")}
    assert {port["port"] for port in anywhere["ports"] if port["protocol"] == "TCP"} == kafka | {5432, 53}


def test_a_worker_reaches_the_servers_that_it_sends_jobs_to(monkeypatch: pytest.MonkeyPatch) -> None:
    models = settings(SERVED, "worker", monkeypatch).models
    assert models.target.engine == "server"
    assert {endpoint.drafter for endpoint in models.endpoints.values()} == {None, "ngram"}
    (rule,) = one(SERVED, "NetworkPolicy", "servers")["spec"]["egress"]
    assert {port["port"] for port in rule["ports"]} == {
        urlsplit(each.url).port for each in models.endpoints.values() if isinstance(each, EndpointSettings)
    }


def test_the_scaler_measures_the_workers_own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings(EXAMPLE, "worker", monkeypatch)
    devices, trigger = one(EXAMPLE, "ScaledObject", "worker")["spec"]["triggers"]
    said = variables(EXAMPLE, "worker")
    assert (devices["type"], trigger["type"]) == ("prometheus", "kafka")
    metadata = trigger["metadata"]
    assert said[metadata["bootstrapServersFromEnv"]] == found.kafka.bootstrap_servers
    assert said[metadata["consumerGroupFromEnv"]] == found.kafka.group_id == KafkaSettings().group_id
    consumer = _member_config(found.kafka, group_id=found.kafka.group_id, client_id="any")
    assert metadata["offsetResetPolicy"] == consumer["auto.offset.reset"]
    assert "topic" not in metadata, "a task that is added later must count"


def test_the_scaler_ends_workers_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time, the next after the last has drained, and a long job that holds its partition's offset counts."""
    found = settings(EXAMPLE, "worker", monkeypatch)
    deployment = one(EXAMPLE, "Deployment", "worker")
    grace_s = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    scaled = one(EXAMPLE, "ScaledObject", "worker")["spec"]
    down = scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    (policy,) = down["policies"]
    assert (policy["type"], policy["value"]) == ("Pods", 1)
    assert policy["periodSeconds"] >= grace_s
    assert down["stabilizationWindowSeconds"] >= grace_s
    assert scaled["cooldownPeriod"] >= grace_s
    assert scaled["triggers"][1]["metadata"]["excludePersistentLag"] == "false"
    assert scaled["minReplicaCount"] >= 1
    assert scaled["maxReplicaCount"] <= found.kafka.num_partitions
    assert scaled["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"], "two would set the number of workers"
    assert "replicas" in one(BASE, "Deployment", "worker")["spec"]


@pytest.mark.parametrize("name", ["worker", "worker-large"])
def test_each_target_is_scaled_by_its_own_tasks(name: str, tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "guides" / "kubernetes.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```toml\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    bindings = load_settings(tmp_path, overrides=tomllib.loads(block)).bindings
    scaled = one(TARGETS, "ScaledObject", name)["spec"]
    assert scaled["scaleTargetRef"]["name"] == one(TARGETS, "Deployment", name)["metadata"]["name"]
    target = variables(TARGETS, name)["ALPHALOOP_MODELS__TARGET__NAME"]
    tasks = [task for task in bindings.tasks if bindings.target_of(task) == target]
    devices, *lags = scaled["triggers"]
    assert [trigger["metadata"]["topic"] for trigger in lags] == [jobs_topic(task) for task in tasks]
    group_devices, group_scaled = one(EXAMPLE, "ScaledObject", "worker")["spec"]["triggers"]
    for trigger in lags:
        assert trigger["metadata"] == {**group_scaled["metadata"], "topic": trigger["metadata"]["topic"]}
    query = devices["metadata"]["query"]
    assert f'{{target="{target}"}}' in query
    assert f'{{task=~"{"|".join(tasks)}"}}' in query
    others = {name: value for name, value in group_devices["metadata"].items() if name != "query"}
    assert others == {name: value for name, value in devices["metadata"].items() if name != "query"}


def test_every_scaler_asks_for_the_metrics_of_the_scheduler() -> None:
    """By names that the process has; a query without an answer is a failure, and then some workers stay."""
    lag = KafkaLag(dict)
    lag.close()
    known = {family.name for family in (*SchedulerMetrics().registry.collect(), *lag.describe())}
    for resources, name in ((EXAMPLE, "worker"), (TARGETS, "worker"), (TARGETS, "worker-large")):
        scaled = one(resources, "ScaledObject", name)["spec"]
        (devices,) = (trigger for trigger in scaled["triggers"] if trigger["type"] == "prometheus")
        assert set(re.findall(r"alphaloop_\w+", devices["metadata"]["query"])) <= known
        assert (devices["metricType"], devices["metadata"]["threshold"]) == ("AverageValue", "1")
        assert devices["metadata"]["ignoreNullValues"] == "false"
        assert scaled["minReplicaCount"] <= scaled["fallback"]["replicas"] <= scaled["maxReplicaCount"]


def test_workers_of_a_second_target_are_others_pods_with_the_same_manifest() -> None:
    """What differs: name, instance, target; all else is the worker's with a GPU under KEDA."""
    first, second = (copy.deepcopy(one(TARGETS, "Deployment", name)) for name in ("worker", "worker-large"))
    written = json.dumps(second).replace("worker-large", "worker").replace("/models/large", "/models/my-target")
    large = json.loads(written.replace('"large"', '"my-target"'))
    for resource in (first, large):
        (container,) = containers(resource)
        container["env"] = {each["name"]: each for each in container["env"]}
        for list_of in (container["volumeMounts"], resource["spec"]["template"]["spec"]["volumes"]):
            list_of.sort(key=str)
    batch_size = containers(first)[0]["env"].pop("ALPHALOOP_WORKER__BATCH_SIZE")
    assert batch_size["value"] == "16", "the one setting that a large model leaves at its default"
    assert large == first
    selectors = [one(TARGETS, "Deployment", name)["spec"]["selector"] for name in ("worker", "worker-large")]
    assert selectors[0] != selectors[1], "else each Deployment would take the other's pods"


@pytest.mark.parametrize("name", ["worker", "worker-large"])
def test_a_worker_with_a_vllm_has_a_gpu_and_an_image_with_both_environments(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = settings(IN_VLLM, name, monkeypatch).models.target
    assert target.engine == "vllm"
    container, ours = process(IN_VLLM, name), process(TARGETS, name)
    assert container["resources"] == ours["resources"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert target.source == variables(TARGETS, name)["ALPHALOOP_MODELS__TARGET__SOURCE"]
    # It may load for longer than any start probe waits, and /healthz is green meanwhile: no probe changes.
    assert [container[probe] for probe in ("livenessProbe", "readinessProbe")] == [
        ours[probe] for probe in ("livenessProbe", "readinessProbe")
    ]
    assert "startupProbe" not in container
    pod = one(IN_VLLM, "Deployment", name)["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= settings(IN_VLLM, name, monkeypatch).worker.drain_s + LEAVING_S
    (shared,) = (volume for volume in pod["volumes"] if volume["name"] == "shm")
    assert shared["emptyDir"]["medium"] == "Memory"
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    # Scheduler and console have the image without vLLM; the example says where both are.
    assert {process(IN_VLLM, other)["image"] for other in ("scheduler", "console")} == {"alphaloop"}
    (example,) = load(FOLDER / "example" / "kustomization.yaml")
    assert container["image"] in [image["name"] for image in example["images"]]
    assert f"FROM plain AS {container['image'].removeprefix('alphaloop-')}\n" in DOCKERFILE
    folder = Path(target.vllm.python).parents[1]
    assert f"python -m venv {folder} " in DOCKERFILE
    assert f" {folder}/bin/pip install " in DOCKERFILE


def test_the_image_with_vllm_has_a_version_that_was_tested_and_writes_where_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (_, stage) = DOCKERFILE.split("FROM plain AS vllm\n")
    stage, _, last = stage.rpartition("FROM ")
    assert last == "plain\n", "an image without vLLM is built where no target is named"
    assert re.findall(r'pip install "vllm==(\S+)"', stage) == [TESTED[-1]]
    (home,) = re.findall(r"^ENV HOME=(\S+)", stage, re.MULTILINE)
    for name in ("worker", "worker-large"):
        writable = {mount["mountPath"] for mount in process(IN_VLLM, name)["volumeMounts"] if not mount.get("readOnly")}
        assert home in writable
    assert re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE) == ["10001", "10001"]
    (program,) = re.findall(r'/opt/vllm/bin/python -c "(.*?)"', stage)
    monkeypatch.setattr("torch.version.cuda", None)
    with pytest.raises(SystemExit, match="without CUDA"):
        exec(program, {})


def test_metrics_have_the_job_names_of_the_alerts() -> None:
    prometheus = yaml.safe_load((ROOT / "configs" / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    jobs = set()
    for monitor in (each for each in EXAMPLE if each["kind"] == "PodMonitor"):
        (scraped,) = monitor["spec"]["podMetricsEndpoints"]
        assert scraped["path"] == "/metrics"
        (relabeling,) = scraped["relabelings"]
        assert (relabeling["action"], relabeling["targetLabel"]) == ("replace", "job")
        jobs.add(relabeling["replacement"])
    assert jobs == {scraped["job_name"] for scraped in prometheus["scrape_configs"]}
