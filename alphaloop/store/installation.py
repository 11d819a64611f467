"""The Kafka that a database belongs to: its jobs come from there, and its results go there."""

from __future__ import annotations

from typing import Final

from sqlalchemy import text

from alphaloop.errors import ConfigError
from alphaloop.store.database import Store

_READ: Final = text("SELECT id, kafka_cluster AS cluster, kafka_prefix AS prefix FROM installation")
_SET: Final = "kafka_cluster = :cluster, kafka_prefix = :prefix, noted_at = now()"
_NOTE: Final = text(f"UPDATE installation SET {_SET} WHERE kafka_cluster IS NULL")  # noqa: S608 - no values
_ADOPT: Final = text(f"""
    UPDATE installation SET id = gen_random_uuid(), {_SET}
    WHERE (kafka_cluster, kafka_prefix) IS DISTINCT FROM (CAST(:cluster AS text), CAST(:prefix AS text))
""")  # noqa: S608 - no values


class InstallationStore(Store):
    """The one row of its table."""

    def belong(self, cluster: str, prefix: str) -> str:
        """Note this cluster and `kafka.prefix` if none is noted; returns the database's id.

        Raises ConfigError where another cluster or prefix is noted, and StoreError.
        """
        noted = self._database.one(_READ)
        if noted.cluster is None:
            self._database.change(_NOTE, {"cluster": cluster, "prefix": prefix})
            noted = self._database.one(_READ)
        if (noted.cluster, noted.prefix) != (cluster, prefix):
            raise ConfigError(
                f"{self._database.redacted_url} belongs to the Kafka cluster {noted.cluster} with kafka.prefix "
                f"{noted.prefix!r}, found the cluster {cluster} with {prefix!r}",
                hint="connect the Kafka and the database that belong together; after a move, or a restore from a "
                f"backup: alphaloop migrate --adopt-cluster {cluster}",
            )
        return str(noted.id)

    def adopt(self, cluster: str, prefix: str) -> bool:
        """Note another cluster or prefix, under a new id, because a copy is another database; whether it is another."""
        return self._database.change(_ADOPT, {"cluster": cluster, "prefix": prefix}) > 0
