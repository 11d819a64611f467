"""What `kubectl kustomize` makes of a folder, as far as configs/kubernetes uses Kustomize; anything else is refused.

Neither PyPI nor Debian has Kustomize 5, so the tests render by themselves. Where kubectl is, a test compares the two.
"""

from __future__ import annotations

import copy
import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

Resource = dict[str, Any]

#: Lists that are merged item by item, and the key by which their items are told apart. Every other list is replaced.
_MERGED_LISTS: Final = {"containers": "name", "env": "name", "volumes": "name", "volumeMounts": "mountPath"}
_KNOWN: Final = {
    *("apiVersion", "kind", "namespace", "resources", "components", "images"),
    *("configMapGenerator", "patches"),
}


_ROOT: Final = Path(__file__).resolve().parents[2]
_CONFIGS = tempfile.TemporaryDirectory(prefix="alphaloop-configs-")


@functools.cache
def mine() -> Path:
    """The overlay of a user's own: made beside the others by the commands of docs/guides/kubernetes.md."""
    guide = (_ROOT / "docs" / "guides" / "kubernetes.md").read_text(encoding="utf-8")
    shutil.copytree(_ROOT / "configs", Path(_CONFIGS.name) / "configs")
    commands = re.findall(r"^cp .*$", guide, re.MULTILINE)
    subprocess.run(["sh", "-euc", "\n".join(commands)], cwd=_CONFIGS.name, check=True)
    return Path(_CONFIGS.name) / "configs" / "kubernetes" / "mine"


def render(folder: Path, *, components: Iterable[Path] = ()) -> list[Resource]:
    """The resources of a folder with a kustomization.yaml, and of these components over it.

    Names of generated ConfigMaps stay without the hash that Kustomize appends to them.
    """
    kustomization = _read(folder)
    assert kustomization["kind"] == "Kustomization"
    resources = _changed(folder, kustomization, [])
    for component in components:
        # As if the same kustomization.yaml named it.
        resources = _changed(component, {**_read(component), "namespace": kustomization["namespace"]}, resources)
    return resources


def load(path: Path) -> list[Resource]:
    """The resources of one file."""
    return [dict(resource) for resource in yaml.safe_load_all(path.read_text(encoding="utf-8"))]


def containers(resource: Resource) -> list[dict[str, Any]]:
    """The containers of a resource that makes pods; none of another resource."""
    pod = resource.get("spec", {}).get("template", {}).get("spec", {})
    return list(pod.get("containers", ()))


def _read(folder: Path) -> dict[str, Any]:
    (kustomization,) = load(folder / "kustomization.yaml")
    assert set(kustomization) <= _KNOWN, f"{folder}: {set(kustomization) - _KNOWN} is not rendered by the tests"
    return kustomization


def _changed(folder: Path, kustomization: Mapping[str, Any], resources: list[Resource]) -> list[Resource]:
    found = [*resources]
    for name in kustomization.get("resources", ()):
        path = (folder / name).resolve()
        found += render(path) if path.is_dir() else load(path)
    for name in kustomization.get("components", ()):
        component = (folder / name).resolve()
        assert _read(component)["kind"] == "Component"
        found = _changed(component, _read(component), found)
    for wanted in kustomization.get("configMapGenerator", ()):
        found = _generated(folder, wanted, found)
    for patch in kustomization.get("patches", ()):
        found = _patched(load(folder / patch["path"])[0], patch.get("target"), found)
    for image in kustomization.get("images", ()):
        for container in (one for resource in found for one in containers(resource)):
            if container["image"] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    if (namespace := kustomization.get("namespace")) is not None:
        for resource in found:
            resource["metadata"]["namespace"] = namespace
    return found


def _generated(folder: Path, wanted: Mapping[str, Any], resources: list[Resource]) -> list[Resource]:
    data: dict[str, str] = {}
    for name in wanted.get("envs", ()):
        lines = (folder / name).read_text(encoding="utf-8").splitlines()
        data |= dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    data |= dict(line.split("=", 1) for line in wanted.get("literals", ()))
    data |= {name: (folder / name).read_text(encoding="utf-8") for name in wanted.get("files", ())}
    if wanted.get("behavior", "create") == "merge":
        (old,) = (one for one in resources if (one["kind"], one["metadata"]["name"]) == ("ConfigMap", wanted["name"]))
        old["data"] |= data
        return resources
    return [*resources, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": wanted["name"]}, "data": data}]


def _patched(patch: Resource, target: Mapping[str, str] | None, resources: list[Resource]) -> list[Resource]:
    chosen = target if target is not None else {"kind": patch["kind"], "name": patch["metadata"]["name"]}
    body = {key: value for key, value in patch.items() if key not in ("apiVersion", "kind", "metadata")}
    matches = [
        resource
        for resource in resources
        if resource["kind"] == chosen["kind"]
        and chosen.get("name") in (None, resource["metadata"]["name"])
        and _has_labels(resource, chosen.get("labelSelector"))
    ]
    assert matches, f"a patch of {chosen} changes nothing"
    for resource in matches:
        _merge(resource, copy.deepcopy(body))
    return resources


def _has_labels(resource: Resource, selector: str | None) -> bool:
    """Whether it has all labels of a selector like `a=b,c=d`; None takes every resource."""
    wanted = dict(pair.split("=") for pair in selector.split(",")) if selector else {}
    return wanted.items() <= resource["metadata"].get("labels", {}).items()


def _merge(into: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        elif isinstance(value, list) and key in _MERGED_LISTS and key in into:
            _merge_items(into[key], value, _MERGED_LISTS[key])
        else:
            into[key] = value


def _merge_items(into: list[dict[str, Any]], over: list[dict[str, Any]], key: str) -> None:
    by_key = {item[key]: item for item in into}
    for item in over:
        if item.get("$patch") == "delete":
            into[:] = [old for old in into if old[key] != item[key]]
        elif item[key] in by_key:
            _merge(by_key[item[key]], item)
        else:
            into.append(item)
