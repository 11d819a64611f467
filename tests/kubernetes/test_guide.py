"""What docs/guides/kubernetes.md says is so: its manifests, its figures, and the names in its commands."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Final

import pytest
import yaml

from alphaloop.settings import load_settings
from alphaloop.settings.load import ENV_PREFIX
from tests.kubernetes.kustomize import containers, render
from tests.kubernetes.test_against_product import EXAMPLE, FOLDER, ROOT, one
from tests.kubernetes.validation import RELEASES, check

GUIDE: Final = (ROOT / "docs" / "guides" / "kubernetes.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


def test_its_manifests_are_of_their_kinds_form() -> None:
    found = [yaml.safe_load(block) for block in blocks("yaml") if "kind: " in block]
    for resource in found:
        check(resource)
    assert {resource["kind"] for resource in found} == {"TriggerAuthentication", "NetworkPolicy", "ScaledObject"}


def test_its_secrets_are_those_that_the_pods_read() -> None:
    made = {
        name: set(re.findall(r"--from-literal=(\w+)=", arguments))
        for name, arguments in re.findall(
            r"create secret generic (\w+) ((?:--from-literal=\S+[ \\\n]*)+)", "\n".join(blocks("sh"))
        )
    }
    assert {key for key in made.pop("settings") if not key.startswith(f"{ENV_PREFIX}KAFKA__SASL_")} == set()
    read: dict[str, set[str]] = {}
    for resource in [*EXAMPLE, *render(FOLDER / "migrate")]:
        for container in containers(resource):
            for variable in (each["valueFrom"]["secretKeyRef"] for each in container["env"] if "valueFrom" in each):
                read.setdefault(variable["name"], set()).add(variable["key"])
    assert made == read


def test_its_overlay_with_vllm_renders_to_workers_that_keda_scales() -> None:
    (overlay,) = (yaml.safe_load(block) for block in blocks("yaml") if "components:" in block)
    resources = render(
        FOLDER / "base", components=[FOLDER / name.removeprefix("../") for name in overlay["components"]]
    )
    (worker,) = containers(one(resources, "Deployment", "worker"))
    said = {variable["name"]: variable.get("value") for variable in worker["env"]}
    assert said["ALPHALOOP_MODELS__TARGET__ENGINE"] == "vllm"
    assert one(resources, "ScaledObject", "worker")["spec"]["scaleTargetRef"]["name"] == "worker"
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for argument in re.findall(r"--build-arg (\w+)=", "\n".join(blocks("sh"))):
        assert f"ARG {argument}=" in dockerfile


def test_kafka_with_tls_takes_the_settings_that_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    (generators,) = (yaml.safe_load(block) for block in blocks("yaml") if "configMapGenerator" in block)
    (settings,) = generators["configMapGenerator"]
    assert (settings["name"], settings["behavior"]) == ("settings", "merge")
    for literal in settings["literals"]:
        monkeypatch.setenv(*literal.split("=", 1))
    for name in ("USERNAME", "PASSWORD"):
        assert f"--from-literal=ALPHALOOP_KAFKA__SASL_{name}=" in GUIDE
        monkeypatch.setenv(f"ALPHALOOP_KAFKA__SASL_{name}", "secret")
    kafka = load_settings(ROOT / "configs").kafka
    assert kafka.security_protocol == "SASL_SSL"
    assert "create secret generic certificates --from-file=ca.pem" in GUIDE
    folder = Path(str(kafka.ssl_ca_location)).parent
    for resource in [*EXAMPLE, *render(FOLDER / "migrate")]:
        for container in containers(resource):
            (mount,) = (each for each in container["volumeMounts"] if each["name"] == "certificates")
            assert mount["mountPath"] == str(folder)
    (policy,) = (yaml.safe_load(block) for block in blocks("yaml") if "NetworkPolicy" in block)
    ports = {str(port["port"]) for rule in policy["spec"]["egress"] for port in rule["ports"]}
    assert {address.rpartition(":")[2] for address in str(kafka.bootstrap_servers).split(",")} <= ports


def test_the_alerts_become_a_rule_by_its_command() -> None:
    (block,) = (block for block in blocks("sh") if "PrometheusRule" in block)
    command = block.replace("| kubectl apply --filename -", "")
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    rule = yaml.safe_load(done.stdout)
    check(rule)
    alerts = yaml.safe_load((ROOT / "configs" / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
    assert rule["spec"]["groups"] == alerts["groups"]


def test_its_figures_are_the_manifests() -> None:
    pod = one(EXAMPLE, "Deployment", "worker")["spec"]["template"]["spec"]
    drain_s = one(EXAMPLE, "ConfigMap", "settings")["data"]["ALPHALOOP_WORKER__DRAIN_S"]
    scaled = one(EXAMPLE, "ScaledObject", "worker")["spec"]
    down = scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    assert f"`worker.drain_s` ({drain_s} s here)" in GUIDE
    assert f"`terminationGracePeriodSeconds: {pod['terminationGracePeriodSeconds']}`" in GUIDE
    assert (down["policies"][0]["periodSeconds"], down["stabilizationWindowSeconds"]) == (300, 600)
    assert "one worker in five minutes, and what was needed in the last ten minutes is kept" in GUIDE
    assert f"Kubernetes {RELEASES[0]} and {RELEASES[1]}" in GUIDE
    notice = (Path(__file__).parent / "schemas" / "NOTICE.md").read_text(encoding="utf-8")
    for name, version in re.findall(r"(KEDA|operator) (\d\.\d+)", GUIDE):
        assert re.search(rf"{name}\]\(\S+\)\s+{re.escape(version)}\.", notice), f"{name} {version}"


def test_its_folders_are_those_that_are_there() -> None:
    said = set(re.findall(r"^\| `([^`]+)` \|", GUIDE, re.MULTILINE))
    there = {f"{path.name}/" if path.is_dir() else path.name for path in FOLDER.iterdir()}
    assert there <= said
