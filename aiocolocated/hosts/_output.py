# SPDX-License-Identifier: Apache-2.0
"""What host processes print and log, on its way into the controller's own streams and loggers."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

from aiocolocated import _service
from aiocolocated.hosts.launchers import HostProcess

Record: TypeAlias = tuple[Any, ...]
"""A log record on its way: plain values, see :func:`pack`."""

_MOST = 1 << 20  # bytes that wait to be printed; more stays in the hosts' pipes
_MOST_RECORDS = 10_000
_RECORD_SIZE = 512  # bytes that a record counts for
_LONGEST_LINE = 1 << 16
_TAIL = 20  # lines that are kept of what a host prints
_SHORT_TAIL = 5  # of them in errors of calls

logger = logging.getLogger("aiocolocated.hosts")


# --- in the host process ------------------------------------------------------------------------------


def pack(record: logging.LogRecord) -> Record:
    """A record as plain values, with its message made."""
    exc_text = record.exc_text
    if exc_text is None and record.exc_info and record.exc_info[0] is not None:
        exc_text = _formatter.formatException(record.exc_info)
    # Plain for sure: what the controller cannot unpickle loses the host.
    return (
        str(record.name),
        int(record.levelno),
        str(record.getMessage()),
        None if exc_text is None else str(exc_text),
        None if record.stack_info is None else str(record.stack_info),
        float(record.created),
        str(record.pathname),
        int(record.lineno),
        str(record.funcName),
        str(record.threadName),
        os.getpid(),
    )


_formatter = logging.Formatter()


class ForwardingHandler(logging.Handler):
    """Collects records for the controller.

    It takes no lock and sends nothing itself: whoever logs may hold any lock of the library, or be about to
    send. ``soon`` is run by the service thread once there is something to send.
    """

    def __init__(self, soon: Callable[[], object]) -> None:
        super().__init__()
        self._soon = soon
        self._armed = False
        self._records: deque[Record] = deque(maxlen=_MOST_RECORDS)

    def createLock(self) -> None:  # a deque needs none
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        """As every handler; that of Python 3.13 enters the lock, although there may be none."""
        kept: Any = self.filter(record)
        if kept:
            self.emit(kept if isinstance(kept, logging.LogRecord) else record)
        return bool(kept)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record until it is sent."""
        try:
            self._records.append(pack(record))
        except Exception:
            self.handleError(record)
            return
        if not self._armed:
            self._armed = True
            _service.inbox.put(self._send)

    def _send(self) -> None:
        self._armed = False  # before it looks, or a record stays
        self._soon()

    def take(self) -> list[Record]:
        """What is to be sent."""
        records: list[Record] = []
        while self._records:
            records.append(self._records.popleft())
        return records


# --- in the controller --------------------------------------------------------------------------------


def unpack(host: str, packed: Record) -> logging.LogRecord:
    """A record of a host for this process's loggers."""
    name, level, message, exc_text, stack_info, created, path, line, function, thread, pid = packed
    record = logging.LogRecord(name, level, path, line, f"[{host}] {message}", (), None, function)
    record.exc_text = exc_text
    record.stack_info = stack_info
    record.created = created
    record.msecs = int((created % 1) * 1000) + 0.0
    record.threadName = thread
    record.process = pid
    record.processName = host
    record.host = host
    return record


def _handle(host: str, packed: Record) -> None:
    own = logging.getLogger(packed[0])
    if own.isEnabledFor(packed[1]):
        own.handle(unpack(host, packed))


def _write(which: int, text: str) -> None:
    stream: Any = (sys.stdout, sys.stderr)[which]
    if stream is not None:
        stream.write(text)
        stream.flush()


class Output:
    """Prints and logs, on a thread of its own: a reader of this program that is slow holds up nobody else.

    Args:
        room: called by that thread when there is room again after there was none.
    """

    def __init__(self, room: Callable[[], object]) -> None:
        self._room = room
        self._queue: SimpleQueue[tuple[int, Callable[[], None]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._full = False
        self._started = False
        self._here = False  # there is no thread
        self._over = threading.Event()
        self._dropped: dict[str, int] = {}

    @property
    def full(self) -> bool:
        """Whether too much waits to be printed; ``room`` will be called."""
        with self._lock:
            self._full = self._waiting > _MOST
            return self._full

    def print_lines(self, host: str, which: int, lines: list[bytes]) -> None:
        """Print lines with the host's name before each."""
        text = "".join(f"[{host}] {line.decode(errors='replace')}\n" for line in lines)
        self._put(len(text), partial(_write, which, text))

    def log(self, host: str, packed: Record) -> None:
        """Have a record of a host handled by the logger of its name."""
        if self._waiting > 4 * _MOST:
            self._dropped[host] = self._dropped.get(host, 0) + 1
            return
        dropped = self._dropped.pop(host, 0)
        if dropped:
            self._put(0, partial(logger.warning, "%s: %d log records were dropped", host, dropped))
        self._put(_RECORD_SIZE + len(packed[2]), partial(_handle, host, packed))

    def _put(self, size: int, action: Callable[[], None]) -> None:
        if self._here:
            _do(action)
            return
        with self._lock:
            self._waiting += size
        self._queue.put((size, action))
        if not self._started:
            self._started = True
            _service.start_thread(self._serve, "aiocolocated-output", self._serve_here)

    def close(self, timeout: float) -> None:
        """Wait for a moment until all is printed; the thread ends when it is."""
        if self._started:
            self._queue.put(None)
            self._over.wait(timeout)

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            size, action = item
            _do(action)
            del item, action
            with self._lock:
                self._waiting -= size
                room = self._full and self._waiting < _MOST // 2
                if room:
                    self._full = False
            if room:
                self._room()
        self._over.set()

    def _serve_here(self) -> None:
        """There is no thread for it, at exit perhaps: print on whichever has something to print."""
        self._here = True
        while not self._queue.empty():
            item = self._queue.get()
            if item is not None:
                _do(item[1])
        self._over.set()


def _do(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:  # a closed stream, or a handler of the user's
        logger.debug("the output of a host is lost", exc_info=True)


class Lines:
    """Makes lines of the pieces that a host prints."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> list[bytes]:
        """The lines that are complete now; no data is the end, which completes the last one."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > _LONGEST_LINE):
            lines.append(self._rest)
            self._rest = b""
        return [line.rstrip(b"\r") for line in lines]


class Printing:
    """A process and what it prints."""

    def __init__(self, name: str, process: HostProcess, output: Output) -> None:
        self.name = name
        self.process = process
        self.tail: list[str] = []  # of its standard error
        self.crash: list[str] = []  # the beginning of what a crash says
        self.open = [not stream.closed for stream in process.outputs]
        self._lines = [Lines() for _ in process.outputs]
        self._output = output

    def read(self, which: int) -> bool:
        """Take some of what it has printed; false if there is nothing now."""
        if not self.open[which]:
            return False
        try:
            data = os.read(self.process.outputs[which].fileno(), 1 << 16)
        except BlockingIOError:
            return False
        except (OSError, ValueError):  # closed
            data = b""
        lines = self._lines[which].add(data)
        if lines:
            self._output.print_lines(self.name, which, lines)
            if which == 1:
                self._keep([line.decode(errors="replace") for line in lines])
        if not data:
            self.open[which] = False
        return bool(data)

    def _keep(self, lines: list[str]) -> None:
        for line in lines:
            if line.strip() and (self.crash or line.startswith("Fatal Python error: ")):
                self.crash = [*self.crash, line][:_SHORT_TAIL]
        self.tail = [*self.tail, *lines][-_TAIL:]

    def read_all(self) -> None:
        """Take all that is there."""
        for which in range(len(self.open)):
            while self.read(which):
                pass

    def finish(self) -> None:
        """It has ended: print an unfinished last line, too."""
        self.read_all()
        for which, lines in enumerate(self._lines):
            if self.open[which] and (rest := lines.add(b"")):
                self._output.print_lines(self.name, which, rest)
                if which == 1:
                    self._keep([line.decode(errors="replace") for line in rest])

    def said(self, *, short: bool) -> list[str]:
        """The last lines of its standard error."""
        lines = self.crash or [line for line in self.tail if line.strip()]
        return [line[:400] for line in lines[-_SHORT_TAIL if short else 0 :]]
