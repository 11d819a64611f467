"""A night of minutes with a real worker: the simulated week's claims, real beside simulated.

    python -m benchmarks.week.night --prompts FOLDER      # 20 minutes, on a machine that does nothing else
    python -m benchmarks.week.night --minutes 2           # whether it works

A drain measures how many jobs a second the worker decodes. Then jobs of three tasks come at .9 of that, two batches
with a deadline among them, and the worker is killed in the middle. docs/concepts/night-benchmark.md says what is
measured and how. Last line: JSON. Exit status 1 where a job ended otherwise than with a text or at its deadline.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from alphaloop.settings import load_settings
from benchmarks.jobs import read_folder
from benchmarks.reporting import FOLDER, checkout, console, machine, parser_of, print_found
from benchmarks.servers import CONFIGS, PROFILE
from benchmarks.week.night.claims import busy_time, deadlines, ends, undated_s
from benchmarks.week.night.deployment import Night, Sending, deployed
from benchmarks.week.night.ledger import Ended, Said
from benchmarks.week.night.report import print_claims, print_deadlines
from benchmarks.week.night.schedule import TASKS, WARM_UP, draw_night, draw_warm_up, made_prompts, numbered
from benchmarks.week.night.simulated import simulated, week_of
from benchmarks.week.play import Outage

_NIGHT: Final = 0.8  #: of the minutes, in which jobs come; the rest is for both drains
_WARM_UP_JOBS: Final = 12  #: a minute of the whole
_DIES: Final = 0.45  #: of the night
_HALF: Final = 0.5
_EXPECTED: Final = frozenset({"succeeded", "expired"})


def main() -> int:
    """Play the night, simulate it, print tables and the JSON line."""
    options = _options()
    return print_found(lambda: _measure(options), lambda found: not found["is_sound"])


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="of the whole, without the servers' start")
    parser.add_argument("--load", type=float, default=0.9, help="offered, over what the first drain decoded")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prompts", type=Path, help=f"folder with {', '.join(f'{task}.jsonl' for task in TASKS)}")
    return parser.parse_args()


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    conditions = {**machine(), **checkout(), "seed": options.seed, "minutes": options.minutes, "load": options.load}
    console.print(conditions)
    prompts = made_prompts(options.seed) if options.prompts is None else _read(options.prompts)
    folder = FOLDER / "night"
    shutil.rmtree(folder, ignore_errors=True)  # servers of a killed run may have left it
    with deployed(folder, options.seed) as night:
        ended, said, facts, outage = _play(night, options, prompts)
    week = week_of(ended, options.seed)
    by_contestant, would_say = simulated(week, outage, options.seed)
    of_night = {name: _of_night(jobs) for name, jobs in by_contestant.items()}
    real, half_s = _of_night(ended), facts["half_s"]
    found = {
        "worker": _figures(real, busy_time(ended, half_s).ratio, said),
        "simulated": _figures(of_night["slack"], busy_time(by_contestant["slack"], half_s).ratio, _judged(would_say)),
    }
    met = {"worker": deadlines(real), **{name: deadlines(jobs) for name, jobs in of_night.items()}}
    print_deadlines(met, sum(job.deadline_s < float("inf") for job in real))
    print_claims(met, found["worker"], found["simulated"])
    is_sound = set(facts["statuses"]) <= _EXPECTED
    return {"night": found, "met": met, **facts, "simulated_load": week.load, **conditions, "is_sound": is_sound}


def _read(folder: Path) -> dict[str, list[str]]:
    prompts = read_folder(folder)
    if missing := [task for task in TASKS if not prompts.get(task)]:
        raise ValueError(
            f"--prompts {folder}: expected prompts of {', '.join(TASKS)}, found none of {', '.join(missing)}"
        )
    return prompts


def _play(
    night: Night, options: argparse.Namespace, prompts: Mapping[str, Sequence[str]]
) -> tuple[list[Ended], list[Said], dict[str, Any], Outage]:
    """The drain, the night, and the drain after it: what became of each job, what was said, figures, and the death."""
    warm_up = draw_warm_up(max(24, round(_WARM_UP_JOBS * options.minutes)), options.seed)
    zero = time.time()
    night.send(warm_up, numbered(warm_up, prompts, options.seed), zero)
    night.wait_ended(len(warm_up))
    drained_s, device_s = time.time() - zero, night.ledger.full_device_s()
    length_s = _NIGHT * 60 * options.minutes
    jobs = draw_night(rate=options.load / device_s, length_s=length_s, seed=options.seed)
    console.print(
        f"drained {len(warm_up)} jobs in {drained_s:.0f} s, {device_s:.3f} device seconds each at full slots: "
        f"{len(jobs)} jobs in {length_s:.0f} s"
    )
    begin = time.time()
    sending = Sending(night, jobs, numbered(jobs, prompts, options.seed + 1), begin)
    sending.start()
    time.sleep(max(0.0, begin + _DIES * length_s - time.time()))
    died_at, back_at = night.kill_and_start()
    console.print(
        f"the worker was killed {died_at - begin:.0f} s into the night, and was back {back_at - died_at:.1f} s later"
    )
    sending.join()
    night.wait_ended(len(warm_up) + len(jobs))
    over_s = time.time() - begin
    ended = night.ledger.ended([*warm_up, *jobs], night.sent_at, zero)
    facts = {
        "num_jobs": len(jobs),
        "num_warm_up": len(warm_up),
        "drained_s": drained_s,
        "device_s": device_s,
        "night_s": length_s,
        "half_s": begin + _HALF * length_s - zero,
        "over_s": over_s,
        "dead_s": back_at - died_at,
        "num_decoded_again": night.ledger.num_decoded_again(),
        "statuses": night.ledger.statuses(),
    }
    lease_s = load_settings(CONFIGS, profile=PROFILE).worker.lease_s
    outage = Outage(died_at - zero, back_at - zero, lease_s)
    return ended, _judged(night.ledger.promises(ended, zero)), facts, outage


def _of_night(ended: Sequence[Ended]) -> list[Ended]:
    return [job for job in ended if job.batch_id != WARM_UP]


def _judged(said: Sequence[Said]) -> list[Said]:
    return [promise for promise in said if promise.batch_id != WARM_UP]


def _figures(ended: Sequence[Ended], busy_ratio: float, said: Sequence[Said]) -> dict[str, Any]:
    median_s, most_s = undated_s(ended)
    return {
        "met": deadlines(ended)["all"],
        "ends": ends(said),
        "busy_planned_over_used": busy_ratio,
        "undated_median_s": median_s,
        "undated_most_s": most_s,
    }


if __name__ == "__main__":
    sys.exit(main())
