"""Who is signed in. Sessions live in this process: a new start asks everyone to sign in again."""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from alphaloop.errors import AlphaloopError
from alphaloop.liveness import basic_credentials
from alphaloop.settings import ConsoleSettings

COOKIE: Final = "alphaloop_console"
USERNAME: Final = "alphaloop"  #: of the one login
#: Wrong passwords that are tried within WINDOW_S; then no one can sign in until the first of them is older.
MAX_FAILURES: Final = 10
WINDOW_S: Final = 60.0
#: After it a person signs in again.
LIFETIME_S: Final = 12 * 3600.0
_MAX_SESSIONS: Final = 1000


class TooManyFailures(AlphaloopError):
    """Too many wrong passwords were tried."""


@dataclass(frozen=True, slots=True)
class Session:
    """A person who has signed in, or a program that sends name and password with its request."""

    username: str
    cookie: str = ""  #: empty: a program, which may read and do nothing else
    token: str = ""  #: that every form of this session sends along
    expires_at: float = 0.0


class Sessions:
    """Checks names and passwords, and remembers who signed in. Threads share it."""

    def __init__(self, settings: ConsoleSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._password, self._clock = settings.password, clock
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._failures: deque[float] = deque()
        self._lock = threading.Lock()

    @property
    def are_needed(self) -> bool:
        """Whether pages are shown to those who signed in only."""
        return self._password is not None

    def sign_in(self, username: str, password: str) -> Session | None:
        """A new session; None for a wrong name or password. Raises TooManyFailures."""
        if not self._is_right(username, password):
            return None
        now = self._clock()
        made = Session(username, secrets.token_urlsafe(32), secrets.token_urlsafe(32), now + LIFETIME_S)
        with self._lock:
            self._sessions[made.cookie] = made
            while len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return made

    def of_cookie(self, cookie: str | None) -> Session | None:
        """The session of a browser; None where it has none or it is over."""
        with self._lock:
            session = self._sessions.get(cookie or "")
            if session is not None and session.expires_at <= self._clock():
                del self._sessions[session.cookie]
                return None
            return session

    def of_header(self, header: str | None) -> Session | None:
        """A program that sends `Authorization: Basic …`. Raises TooManyFailures."""
        if (given := basic_credentials(header)) is None:
            return None
        try:
            username, _, password = given.decode().partition(":")
        except UnicodeDecodeError:
            return None
        return Session(username) if self._is_right(username, password) else None

    def end(self, session: Session) -> None:
        """Sign out."""
        with self._lock:
            self._sessions.pop(session.cookie, None)

    def _is_right(self, username: str, password: str) -> bool:
        if self._password is None:
            return False
        now = self._clock()
        with self._lock:
            while self._failures and now - self._failures[0] > WINDOW_S:
                self._failures.popleft()
            if len(self._failures) >= MAX_FAILURES:
                raise TooManyFailures(hint=f"try again in {WINDOW_S:.0f} seconds")
            # Both in constant time, so that an answer's delay gives nothing of either away.
            is_name = hmac.compare_digest(username.encode(), USERNAME.encode())
            is_password = hmac.compare_digest(password.encode(), self._password.get_secret_value().encode())
            if not (is_name and is_password):
                self._failures.append(now)
            return is_name and is_password


def is_token_of(session: Session, token: str) -> bool:
    """Whether a form was made for this session."""
    return bool(session.token) and hmac.compare_digest(session.token.encode(), token.encode())
