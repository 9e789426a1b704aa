"""Messages from any thread to the engine's."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Inbox:
    _messages: deque[Callable[[], None]] = field(default_factory=deque[Callable[[], None]])
    _wake: threading.Condition = field(default_factory=threading.Condition)

    def __len__(self) -> int:
        return len(self._messages)

    def post(self, message: Callable[[], None]) -> None:
        """From any thread: `message` is run by the next `take`."""
        with self._wake:
            self._messages.append(message)
            self._wake.notify()

    def take(self) -> None:
        """Runs all messages that are there; what comes meanwhile is for the next time."""
        with self._wake:
            messages = list(self._messages)
            self._messages.clear()
        for message in messages:
            try:
                message()
            except Exception:
                # One message, of one session, must not end all others.
                log.exception("a message failed")

    def wait(self, until: float | None) -> None:
        """Waits for a message; until that time of `time.monotonic` at most."""
        timeout = None if until is None else max(0.0, until - time.monotonic())
        with self._wake:
            self._wake.wait_for(lambda: bool(self._messages), timeout)
