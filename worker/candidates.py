"""Drafters that were trained anew: fetched, loaded beside their parents, and on trial with them.

A worker looks for candidates of its target every few seconds. A thread fetches their files, each compared with what was
kept; the loop's thread loads them between two rounds. A candidate drafts under a name of its own (`heads-2`), with the
settings and the costs of its parent, because both are networks of one shape. Each hybrid that asks the parent gets a
successor that asks the candidate (`both-2`). A candidate that was kept is loaded in the same way after a restart.

Nothing here can cost a job: of a candidate that cannot be fetched or loaded, its refresh says why.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import Engine
from alphaloop.errors import AlphaloopError, ContentStoreUnavailable, StoreUnavailable, reason_of
from alphaloop.settings import ModelSettings
from alphaloop.settings.models import Successor
from alphaloop.store.decision_inputs import CostStore, CostSubject, DraftRegistry
from alphaloop.store.refreshes import Refresh, RefreshState, RefreshStore
from worker.background import BackgroundThread
from worker.costs.learning import LiveCosts
from worker.deciding.decider import Deciding
from worker.foundation import Foundation
from worker.training.keep import KeptDrafts

log = logging.getLogger(__name__)

#: Between two looks: a candidate drafts within ten seconds of its trial's beginning.
LOOK_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Fetched:
    """A candidate whose files are on this machine, and what drafts with them."""

    refresh: Refresh
    successors: Mapping[str, Successor]  #: by name, the candidate first


@dataclass(eq=False)
class Candidates:
    """The candidates of one worker. `look` belongs to the thread of `threads`, all else to the loop's.

    `loaded` is called with each drafter that was loaded, and the name of its parent. `is_stale` is asked with a drafter
    and its revision.
    """

    store: RefreshStore
    fetch: Callable[[str], object]  #: from an address to the path of a folder
    engine: Engine
    configured: ModelSettings
    loaded: Callable[[DrafterState, str], object]
    is_stale: Callable[[str, str], bool]
    write: Callable[[str, Callable[[], object]], object]
    threads: tuple[BackgroundThread, ...] = ()
    _seen: set[int] = field(default_factory=set)  # refreshes whose candidate was fetched, or cannot be
    _fetched: deque[Fetched] = field(default_factory=deque)
    _on_trial: frozenset[int] = frozenset()
    _pairs: dict[int, list[tuple[str, str]]] = field(default_factory=dict)  # loaded: candidate and parent, by refresh

    def look(self) -> None:
        """Fetch the candidates that are new. One whose store is away is tried again with the next look."""
        try:
            trials = self.store.trials(self.engine.identity.target_revision)
        except StoreUnavailable as error:
            log.warning("candidates not read: %s", error.message, extra={"action": "candidates_not_read"})
            return
        self._on_trial = frozenset(refresh.id for refresh in trials if refresh.state is RefreshState.TRIAL)
        for refresh in reversed(trials):
            if refresh.id in self._seen:
                continue
            try:
                source = str(self.fetch(refresh.location or ""))
                name = refresh.candidate_name or ""
                self._fetched.append(Fetched(refresh, self.configured.successors(refresh.drafter, name, source)))
            except ContentStoreUnavailable as error:
                extra = {"action": "candidate_not_fetched", "drafter": refresh.candidate_name}
                log.warning("%s is not fetched yet: %s", refresh.candidate_name, error.message, extra=extra)
                continue
            except AlphaloopError as error:
                self._not_loaded(refresh, error.message)
            self._seen.add(refresh.id)

    def load_fetched(self) -> None:
        """Load what was fetched since the last call: candidates first, and hybrids whose candidate was loaded."""
        while self._fetched:
            fetched = self._fetched.popleft()
            refresh = fetched.refresh
            for name, successor in fetched.successors.items():
                try:
                    self._load(refresh, name, successor)
                except AlphaloopError as error:
                    why = error.message
                except Exception as error:
                    log.exception("%s cannot be loaded", name, extra={"action": "candidate_failed"})
                    why = f"{reason_of(error)}; the worker's log says more"
                else:
                    continue
                if name == refresh.candidate_name:
                    self._not_loaded(refresh, why)
                    break
                log.error("%s drafts nothing: %s", name, why, extra={"action": "candidate_not_loaded", "drafter": name})

    def rivals(self) -> dict[str, DrafterState]:
        """By drafter, the one that it is on trial with: candidate and parent are each other's rival.

        A drafter that keeps keys and values has none: it would lose them whenever the other one drafts.
        """
        known = {drafter.name: drafter for drafter in self.engine.drafters}
        rivals: dict[str, DrafterState] = {}
        for refresh_id in self._on_trial & self._pairs.keys():
            for names in self._pairs[refresh_id]:
                pair = [known[name] for name in names if name in known]
                if len(pair) == 2 and all(self._is_comparable(drafter) for drafter in pair):
                    rivals |= {pair[0].name: pair[1], pair[1].name: pair[0]}
        return rivals

    def _is_comparable(self, drafter: DrafterState) -> bool:
        return not drafter.cache_bytes_per_token and not self.is_stale(drafter.name, drafter.revision)

    def _load(self, refresh: Refresh, name: str, successor: Successor) -> None:
        names = {drafter.name for drafter in self.engine.drafters}
        if not names.issuperset(successor.settings.asks):
            return  # a source of the hybrid is retired
        revision = refresh.candidate_revision if name == refresh.candidate_name else None
        self.loaded(self.engine.add_drafter(name, successor.settings, revision), successor.parent)
        self._pairs.setdefault(refresh.id, []).append((name, successor.parent))
        extra = {"action": "candidate_loaded", "drafter": name, "parent": successor.parent}
        log.info("%s drafts beside %s", name, successor.parent, extra=extra)

    def _not_loaded(self, refresh: Refresh, why: str) -> None:
        extra = {"action": "candidate_not_loaded", "drafter": refresh.candidate_name, "refresh": refresh.id}
        log.error("%s drafts nothing: %s", refresh.candidate_name, why, extra=extra)
        say = partial(self.store.say, refresh.id, refresh.attempt, f"not loaded: {why}")
        self.write("why a candidate is not loaded", say)


def open_candidates(base: Foundation, deciding: Deciding, configured: ModelSettings) -> Candidates:
    """The candidates of this worker; of one whose servers draft themselves there are none."""
    engine, identity = base.engine, base.engine.identity
    costs, revisions, cache = deciding.costs, deciding.revisions, deciding.evidence_cache
    registry, stored = DraftRegistry(base.database), CostStore(base.database)

    def loaded(drafter: DrafterState, parent: str) -> None:
        revisions[drafter.name] = drafter.revision
        register = partial(registry.register_served, drafter, identity.target_revision)
        base.background.put("a drafter that was trained anew", register)
        if isinstance(costs, LiveCosts):
            where = CostSubject(identity.host, identity.device, identity.engine, identity.target_revision, revisions)
            copied = costs.copy(parent, drafter.name)
            base.background.put("costs of a drafter that was trained anew", partial(stored.save, where, copied))

    candidates = Candidates(
        store=RefreshStore(base.database),
        fetch=KeptDrafts(base.settings).fetch,
        engine=engine,
        configured=configured,
        loaded=loaded,
        is_stale=cache.is_stale,
        write=base.background.put,
    )
    if configured.target.engine == "own":
        candidates.threads = (BackgroundThread("candidates", candidates.look, every_s=LOOK_S),)
    return candidates
