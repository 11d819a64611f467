"""The data that `alphaloop calibrate`, `alphaloop check-pair` and `alphaloop check-server` ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from alphaloop.cost import CostPoint
from alphaloop.engine_identity import EngineIdentity
from alphaloop.server_identity import Granularity, ServerKind

Verdict = Literal["ok", "warning", "refused"]


@dataclass(frozen=True, slots=True)
class Calibration:
    """What rounds cost on this device."""

    identity: EngineIdentity
    points: tuple[CostPoint, ...]
    seconds: float  #: in all, the loading of the model included
    is_stored: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """One check, of a draft against its target or of a server, and what it found."""

    check: str
    verdict: Verdict
    sentence: str


@dataclass(frozen=True, slots=True)
class PairCheck:
    """Every check of one pair."""

    target: str
    draft: str
    findings: tuple[Finding, ...]

    @property
    def is_refused(self) -> bool:
        """Whether a worker would refuse the draft."""
        return any(finding.verdict == "refused" for finding in self.findings)


@dataclass(frozen=True, slots=True)
class ServerCheck:
    """What an inference server can tell."""

    url: str
    kind: ServerKind
    model: str
    granularity: Granularity  #: of the counts of a text that ended at its limit
    findings: tuple[Finding, ...]
