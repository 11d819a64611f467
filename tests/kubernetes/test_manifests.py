"""The manifests are of their kinds' form, refer to each other rightly, and ask for no privilege."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
import yaml

from tests.kubernetes.kustomize import Resource, containers, load, mine, render
from tests.kubernetes.validation import check

FOLDER: Final = Path(__file__).resolve().parents[2] / "configs" / "kubernetes"
COMPONENTS: Final = [FOLDER / name for name in ("gpu", "servers", "keda", "monitoring")]
#: Every way of combining what is there that somebody may apply.
RENDERED: Final[dict[str, list[Resource]]] = {
    "namespace": load(FOLDER / "namespace.yaml"),
    "base": render(FOLDER / "base"),
    "migrate": render(FOLDER / "migrate"),
    **{f"base and {path.name}": render(FOLDER / "base", components=[path]) for path in COMPONENTS},
    "two targets": render(FOLDER / "base", components=[FOLDER / name for name in ("gpu", "keda", "targets")]),
    "vLLM": render(FOLDER / "base", components=[FOLDER / name for name in ("gpu", "keda", "targets", "vllm")]),
    "example": render(mine()),
    "example of migrate": render(mine() / "migrate"),
}
KUSTOMIZE_SINCE: Final = 5


def every() -> list[Any]:
    """Each resource once, however many combinations have it."""
    by_text = {
        json.dumps(resource): (f"{name}: {resource['kind']} {resource['metadata']['name']}", resource)
        for name, resources in RENDERED.items()
        for resource in resources
    }
    return [pytest.param(resource, id=where) for where, resource in by_text.values()]


def pods(resources: list[Resource]) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """Labels and specification of each pod template."""
    for resource in resources:
        if containers(resource):
            template = resource["spec"]["template"]
            yield template["metadata"]["labels"], template["spec"]


def chosen(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes a pod."""
    rules = selector.get("matchExpressions", ())
    assert all(rule["operator"] == "In" for rule in rules)
    wanted = selector.get("matchLabels", {}).items()
    return wanted <= labels.items() and all(labels.get(rule["key"]) in rule["values"] for rule in rules)


@pytest.mark.parametrize("resource", every())
def test_every_resource_is_of_its_kinds_form(resource: Resource) -> None:
    check(resource)


@pytest.mark.parametrize(
    ("kind", "path", "key"),
    [
        ("Deployment", ["spec", "template", "spec"], "terminationGracePeriod"),
        ("ScaledObject", ["spec"], "maxReplicas"),
        ("PodMonitor", ["spec"], "endpoints"),
        ("NetworkPolicy", ["spec"], "policyType"),
    ],
)
def test_a_misspelt_key_is_refused(kind: str, path: list[str], key: str) -> None:
    resource = copy.deepcopy(next(one for one in RENDERED["example"] if one["kind"] == kind))
    place = resource
    for part in path:
        place = place[part]
    place[key] = 1
    with pytest.raises(jsonschema.ValidationError, match=key):
        check(resource)


def test_every_file_is_rendered() -> None:
    """A file that no kustomization.yaml names would be checked by nobody."""
    named = {FOLDER / "namespace.yaml"}
    for path in FOLDER.rglob("kustomization.yaml"):
        (said,) = load(path)
        named |= {path, *(path.parent / name for name in said.get("resources", ()))}
        named |= {path.parent / patch["path"] for patch in said.get("patches", ())}
        for wanted in said.get("configMapGenerator", ()):
            named |= {path.parent / name for name in (*wanted.get("envs", ()), *wanted.get("files", ()))}
    assert {path for path in FOLDER.rglob("*") if path.is_file()} <= named


@pytest.mark.parametrize("name", RENDERED)
def test_names_are_unique_and_in_the_namespace(name: str) -> None:
    places = [(one["kind"], one["metadata"]["name"]) for one in RENDERED[name]]
    assert len(places) == len(set(places))
    (namespace,) = RENDERED["namespace"]
    if name != "namespace":
        assert {one["metadata"]["namespace"] for one in RENDERED[name]} == {namespace["metadata"]["name"]}


@pytest.mark.parametrize("name", ["base", "migrate", "example", "example of migrate", "two targets", "vLLM"])
def test_pods_ask_for_no_privilege(name: str) -> None:
    """What Pod Security calls restricted, which the namespace enforces, and a root file system that is read-only."""
    found = list(pods(RENDERED[name]))
    assert found
    for _, pod in found:
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(pod)
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for volume in pod["volumes"]:
            assert set(volume) - {"name"} <= {"emptyDir", "persistentVolumeClaim", "configMap", "secret"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("name", ["base", "example", "two targets", "vLLM"])
def test_what_is_referred_to_exists(name: str) -> None:
    """ConfigMaps, claims, the service account, volumes. Secrets and the models' claim are the user's."""
    resources = RENDERED[name]
    there = {(one["kind"], one["metadata"]["name"]) for one in resources}
    for _, pod in pods(resources):
        assert ("ServiceAccount", pod["serviceAccountName"]) in there
        volumes = {volume["name"] for volume in pod["volumes"]}
        for volume in pod["volumes"]:
            if volume.get("configMap", {}).get("name") == "configs" and name != "example":
                continue  # the overlay's
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in there
            if (claim := volume.get("persistentVolumeClaim", {}).get("claimName")) not in (None, "models"):
                assert ("PersistentVolumeClaim", claim) in there
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            sources = [one["configMapRef"]["name"] for one in container["envFrom"] if "configMapRef" in one]
            assert all(("ConfigMap", source) in there for source in sources)


def test_selectors_take_the_pods_that_they_mean() -> None:
    """Of Deployments, disruption budgets, policies, monitors and the Service; and the named ports exist there."""
    resources = RENDERED["example"]
    expected = {
        ("Deployment", "worker"): {"worker"},
        ("Deployment", "scheduler"): {"scheduler"},
        ("Deployment", "console"): {"console"},
        ("Service", "console"): {"console"},
        ("PodDisruptionBudget", "worker"): {"worker"},
        ("PodDisruptionBudget", "scheduler"): {"scheduler", "console"},
        ("NetworkPolicy", "alphaloop"): {"worker", "scheduler", "console"},
        ("NetworkPolicy", "console"): {"console"},
        ("PodMonitor", "worker"): {"worker"},
        ("PodMonitor", "scheduler"): {"scheduler", "console"},
    }
    found = {}
    for resource in resources:
        spec = resource.get("spec", {})
        selector = spec.get("podSelector", spec.get("selector"))
        if selector is None:
            continue
        selector = {"matchLabels": selector} if resource["kind"] == "Service" else selector
        taken = [(labels, pod) for labels, pod in pods(resources) if chosen(selector, labels)]
        key = (resource["kind"], resource["metadata"]["name"])
        found[key] = {labels["app.kubernetes.io/component"] for labels, _ in taken}
        for _, pod in taken:
            named = {port["name"] for container in pod["containers"] for port in container["ports"]}
            assert wanted_ports(resource) <= named, key
    assert found == expected
    (migration,) = (labels for labels, _ in pods(RENDERED["migrate"]))
    everything = next(one for one in resources if one["kind"] == "NetworkPolicy")
    assert chosen(everything["spec"]["podSelector"], migration)


def wanted_ports(resource: Resource) -> set[str]:
    """The names of ports that a Service, a policy's ingress or a monitor uses."""
    spec = resource["spec"]
    if resource["kind"] == "Service":
        return {port["targetPort"] for port in spec["ports"]}
    if resource["kind"] == "PodMonitor":
        return {endpoint["port"] for endpoint in spec["podMetricsEndpoints"]}
    return {port["port"] for rule in spec.get("ingress", ()) for port in rule["ports"]}


def test_no_image_is_floating() -> None:
    for name in ("example", "example of migrate"):
        for resource in RENDERED[name]:
            assert all(container["image"].rpartition(":")[2][:1].isdigit() for container in containers(resource))


@pytest.mark.parametrize("name", ["base", "migrate", "mine", "mine/migrate"])
def test_kubectl_renders_the_same(name: str) -> None:
    """The renderer of the tests is compared with the real one. CI has no way to get that."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is missing: neither PyPI nor Debian has one with Kustomize 5")
    told = subprocess.run([kubectl, "version", "--client", "--output=json"], capture_output=True, text=True, check=True)
    version = str(json.loads(told.stdout).get("kustomizeVersion", "v0"))
    if int(version.removeprefix("v").split(".")[0]) < KUSTOMIZE_SINCE:
        pytest.skip(f"kubectl has Kustomize {version}")
    folder = mine().parent / name
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=True)
    theirs = [dict(resource) for resource in yaml.safe_load_all(done.stdout)]
    assert normal(theirs) == normal(render(folder))


def normal(resources: list[Resource]) -> Any:
    """Without the hashes of generated names, and in one order."""
    text = json.dumps(resources)
    for resource in resources:
        name = resource["metadata"]["name"]
        if resource["kind"] == "ConfigMap":
            text = text.replace(f'"{name}"', f'"{name.rsplit("-", 1)[0] if "-" in name else name}"')
    return ordered(json.loads(text))


def ordered(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: ordered(value) for key, value in node.items()}
    if isinstance(node, list) and all(isinstance(item, dict) for item in node):
        return sorted((ordered(item) for item in node), key=lambda item: json.dumps(item, sort_keys=True))
    return node
