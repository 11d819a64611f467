"""Whether a resource is of its kind's form, by the schemas of Kubernetes, of KEDA and of the Prometheus operator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import jsonschema
import kubernetes_validate

#: The oldest and the newest release of Kubernetes that the manifests are checked for.
RELEASES: Final = ("1.29", "1.37")
_FOREIGN: Final = {path.stem: path for path in (Path(__file__).parent / "schemas").glob("*.json")}


def check(resource: Mapping[str, Any]) -> None:
    """Raises jsonschema.ValidationError for a wrong resource, an unknown key included."""
    if resource["kind"] in _FOREIGN:
        schema = json.loads(_FOREIGN[resource["kind"]].read_text(encoding="utf-8"))
        jsonschema.Draft202012Validator(schema).validate(resource)
        return
    for release in RELEASES:
        kubernetes_validate.validate(resource, release, strict=True)
