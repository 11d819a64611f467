"""Write the schemas of foreign Kubernetes resources anew, into tests/kubernetes/schemas.

    python -m venv /tmp/crds
    /tmp/crds/bin/pip install cloudcoil-models-keda==2.16.1.0 cloudcoil-models-prometheus-operator==0.80.1.0
    /tmp/crds/bin/python scripts/crd_schemas.py

Those packages (Apache-2.0) hold models that were made from the CustomResourceDefinitions of KEDA and the Prometheus
operator. The schemas are stricter than an API server in one point: an unknown key is refused, not dropped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from cloudcoil.models.keda.v1alpha1 import ScaledObject, TriggerAuthentication
from cloudcoil.models.prometheus_operator.v1 import PodMonitor, PrometheusRule

FOLDER: Final = Path(__file__).resolve().parents[1] / "tests" / "kubernetes" / "schemas"
KINDS: Final = (ScaledObject, TriggerAuthentication, PodMonitor, PrometheusRule)
#: What says nothing about a manifest. A `title` is dropped where it is a text, since a property may have that name.
_WORDS: Final = ("title", "description", "default")


def main() -> None:
    """Write a file for each kind."""
    for kind in KINDS:
        schema = strict(kind.model_json_schema(by_alias=True))
        schema["required"] = sorted({*schema.get("required", ()), "apiVersion", "kind", "metadata"})
        schema["properties"].pop("status", None)
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **only_used(schema)}
        path = FOLDER / f"{kind.__name__}.json"
        path.write_text(json.dumps(schema, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def strict(node: Any) -> Any:
    """The same schema without words, without null as a value, and with every object closed to unknown keys."""
    if isinstance(node, list):
        return [strict(part) for part in node]
    if not isinstance(node, dict):
        return node
    node = {key: value for key, value in node.items() if not (key in _WORDS and not isinstance(value, dict))}
    options = [option for option in node.get("anyOf", ()) if option != {"type": "null"}]
    if len(options) == 1:
        return strict({**{key: value for key, value in node.items() if key != "anyOf"}, **options[0]})
    if "properties" in node:
        node.setdefault("additionalProperties", False)
        node["properties"].pop("managedFields", None)
    return {key: strict(value) for key, value in node.items()}


def only_used(schema: dict[str, Any]) -> dict[str, Any]:
    """Without definitions that nothing refers to."""
    while True:
        text = json.dumps(schema)
        unused = [name for name in schema["$defs"] if f'"#/$defs/{name}"' not in text]
        if not unused:
            return schema
        for name in unused:
            del schema["$defs"][name]


if __name__ == "__main__":
    main()
