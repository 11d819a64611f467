"""The servers of a run, its topics, and the settings that its workers get."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from pydantic import SecretStr

from alphaloop.embedded.servers import EmbeddedPostgres
from alphaloop.kafka.topics import ensure_topics
from alphaloop.settings import KafkaSettings
from alphaloop.store.schema import upgrade
from tests.chaos.brokers import Brokers
from tests.chaos.fleet import CHECKOUT, Fleet
from tests.chaos.proxy import Proxy
from tests.chaos.size import Size
from tests.chaos.small_disk import SmallDisk
from tests.chaos.work import NUM_RETRIES, REAL_TARGET, TASK
from tests.chaos.worker_process import FAILURES, ROUND_S
from tests.chaos.world import Servers, proxied

GROUP: Final = "chaos-workers"
NUM_PARTITIONS: Final = 8
#: Settings that nothing uses here, to be searched for in the logs: one of Kafka, and one in the database's URL.
PLANTED_SECRET: Final = "planted-secret-5a1d0c"
PLANTED_URL_SECRET: Final = "planted-key-password-77e0b2"
#: Seconds, short enough that a job is tried again within a phase.
_RETRY_DELAYS_S: Final = [1 + number for number in range(NUM_RETRIES)]
#: As many as two cores bear.
_NUM_REAL_WORKERS: Final = 2


@contextmanager
def running_servers(size: Size, kafka_home: Path, folder: Path) -> Iterator[Servers]:
    """Start brokers, database and proxy, and make the topics."""
    with ExitStack() as stack:
        brokers = Brokers(kafka_home, folder / "kafka", size.num_brokers)
        stack.callback(brokers.stop)
        brokers.start()
        # Durable, because a Postgres that is killed may lose what it acknowledged otherwise, and jobs with it.
        disk = SmallDisk.mounted()
        if disk is not None:
            stack.callback(disk.close)
        postgres = EmbeddedPostgres(folder / "postgres", durable=True, log_dir=folder / "logs" / "postgres")
        stack.callback(postgres.stop)
        url = postgres.start()
        if disk is not None:
            disk.hold_tables(url)
        upgrade(SecretStr(url))
        proxy = Proxy(urlsplit(url).port or 5432)
        stack.callback(proxy.close)
        kafka = KafkaSettings(
            bootstrap_servers=brokers.addresses,
            num_partitions=NUM_PARTITIONS,
            replication_factor=size.num_brokers,
            retry_delays_s=_RETRY_DELAYS_S,
        )
        ensure_topics(kafka, [TASK], high=[TASK])
        yield Servers(brokers, kafka, postgres, url, proxy, disk)


def null_fleet(size: Size, folder: Path, servers: Servers, tasks: Sequence[str] = (TASK,)) -> Fleet:
    """Workers with the null engine, for these tasks."""
    failures = folder / "failures"
    failures.mkdir(parents=True)
    environment = {
        **_environment(size, folder, servers, tasks),
        ROUND_S: str(size.round_s),
        FAILURES: str(failures),
    }
    return Fleet(environment, folder / "logs", size.num_workers, name="null")


def real_fleet(size: Size, folder: Path, servers: Servers) -> Fleet:
    """Workers with the real engine."""
    environment = {
        **_environment(size, folder, servers),
        **{f"ALPHALOOP_MODELS__TARGET__{name.upper()}": str(value) for name, value in REAL_TARGET.items()},
        "ALPHALOOP_WORKER__CALIBRATION_BUDGET_S": "0",
    }
    return Fleet(environment, folder / "logs", _NUM_REAL_WORKERS, name="real")


def schedulers(size: Size, folder: Path, servers: Servers) -> Fleet:
    """One scheduler, which measures every few seconds. It has no probe prompts, so it sends no jobs."""
    environment = {
        **_environment(size, folder, servers),
        "ALPHALOOP_SCHEDULER__INTERVAL_S": str(size.measure_every_s),
        "ALPHALOOP_DATA_DIR": str(folder / "data"),
    }
    return Fleet(
        environment,
        folder / "logs",
        1,
        name="scheduler",
        program=("tests.chaos.worker_process", "scheduler"),
        port_setting="ALPHALOOP_SCHEDULER__HTTP_PORT",
    )


def _environment(size: Size, folder: Path, servers: Servers, tasks: Sequence[str] = (TASK,)) -> Mapping[str, str]:
    """Every guarantee as it is shipped; times short enough to be exceeded within a phase."""
    return {
        "KAFKA_BOOTSTRAP_SERVERS": servers.brokers.addresses,
        "DATABASE_URL": f"{proxied(servers.database_url, servers.proxy.port)}?sslpassword={PLANTED_URL_SECRET}",
        "PYTHONPATH": str(CHECKOUT),
        "ALPHALOOP_CONFIGS": str(_write_configs(folder / "configs", tasks)),
        "ALPHALOOP_KAFKA__GROUP_ID": GROUP,
        "ALPHALOOP_KAFKA__SESSION_TIMEOUT_MS": str(int(1000 * size.session_timeout_s)),
        "ALPHALOOP_KAFKA__NUM_PARTITIONS": str(NUM_PARTITIONS),
        "ALPHALOOP_KAFKA__REPLICATION_FACTOR": str(size.num_brokers),
        "ALPHALOOP_KAFKA__RETRY_DELAYS_S": json.dumps(_RETRY_DELAYS_S),
        "ALPHALOOP_KAFKA__EXTRA": json.dumps({"topic.metadata.refresh.interval.ms": 1000}),
        "ALPHALOOP_KAFKA__SASL_PASSWORD": PLANTED_SECRET,
        "ALPHALOOP_MODELS__TARGET__NAME": "instant",  # the null engine's: workers of one group serve one target
        "ALPHALOOP_WORKER__LEASE_S": str(size.lease_s),
        "ALPHALOOP_LOGS__FORMAT": "json",
    }


def _write_configs(folder: Path, tasks: Sequence[str]) -> Path:
    """The shipped models, and these tasks."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(CHECKOUT / "configs" / "models.toml", folder)
    (folder / "tasks.toml").write_text("".join(f'[tasks.{task}]\ndescription = "jobs of a run"\n' for task in tasks))
    return folder
