# SPDX-License-Identifier: Apache-2.0
"""Worker threads: channels that may run are handed to them; they run calls until there is nothing.

The pool is elastic: a thread is added only when a channel has waited about a millisecond with no
thread idle, and idle ones are reused last in, first out, so that few threads stay warm.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from aiocolocated import _compat, _service, _settings
from aiocolocated._loops import Wakes
from aiocolocated._settings import LOCK
from aiocolocated._types import RUNNING

if TYPE_CHECKING:
    from aiocolocated._ordering import ChannelOrder

logger = logging.getLogger("aiocolocated")

_PATIENCE = 0.001  # seconds a runnable channel waits before a thread is added
_LIMIT_WARNING = 0.5  # seconds a runnable channel waits at the limit before it is reported
_TURN = 0.001  # seconds that one channel has a worker while others wait for one
_QUICK = 50e-6  # seconds: after so short a body the next one is expected to be short, too
_LONGEST_OWED = (
    0.0005  # seconds for which short bodies may follow each other before loops are woken
)
_REFUSED_PAUSE = 1.0  # seconds until the next try after the system refused a thread


class Job(Protocol):
    """A call, as a worker sees it."""

    _started: float
    _group: Any
    _may_wait: Callable[[], bool] | None  # whether what is to be sent may wait for this call

    def _is_quick(self) -> bool:
        """Whether `_execute` takes a moment, so that a loop's thread may do it."""
        ...

    def _execute(self, wakes: Wakes) -> bool:
        """Run the body and settle; false if that takes place elsewhere.

        Called without the lock; must not raise. What went on elsewhere has its channel scheduled
        when it is over, and is executed again to settle.
        """
        ...

    def _break_off(self, error: BaseException, wakes: Wakes) -> None:
        """Settle whatever state the call is in."""

    def _describe(self) -> str: ...


class Lane(Protocol):
    """A channel, as a worker sees it."""

    _order: ChannelOrder[Any]
    _stream: int
    _worker: Worker | None  # of a channel with a thread of its own
    _nested: bool
    _runnable_since: float

    def _admit(self, wakes: Wakes) -> None:
        """Give places that became free to calls that wait for room."""


class _Local(threading.local):
    """What the library knows of this thread."""

    call: Any = None  # the call whose body runs on this thread
    position: Any = None  # the channel of this thread, see _channels
    worker: Worker | None = None


local = _Local()


class Worker:
    """A thread that serves one lane after another."""

    __slots__ = (
        "call",
        "dedicated",
        "ending",
        "extra",
        "first",
        "lane",
        "owed_since",
        "owner",
        "pool",
        "seen",
        "started",
        "stuck",
        "waiting",
        "wake",
        "wakes",
    )

    def __init__(self, pool: Pool, first: Lane | None, *, dedicated: bool = False) -> None:
        self.pool = pool
        self.first = first
        self.lane: Lane | None = None  # handed over together with `wake`
        self.call: Job | None = None
        self.dedicated = dedicated
        self.owner: weakref.ref[Lane] | None = None  # of a dedicated worker
        self.ending = False  # nothing will be handed over any more
        self.extra = False  # beyond the limit, for what takes a moment only
        self.seen = 0.0  # start of the call that ran at the last look
        self.stuck = False  # in one body for longer than a moment
        self.waiting = 0  # nested waits of the body: the slot is given back
        self.wake = threading.Lock()
        self.wake.acquire()
        self.wakes = Wakes()
        self.owed_since = 0.0
        self.started = 0.0  # the last call

    def run(self) -> None:
        """Serve lanes until idle for too long."""
        local.worker = self
        wakes = self.wakes
        lane, self.first = self.first, None
        try:
            while True:
                if lane is not None:
                    self._serve(lane, wakes)
                    lane = None
                with LOCK:
                    lane = self.pool.next_lane(self)
                if lane is not None:
                    continue
                if wakes:
                    self.owed_since = 0.0
                    wakes.pay()  # last of all: the loop's thread wants the GIL as soon as it wakes
                lane = self._wait()
                if lane is None:
                    return
        finally:
            local.worker = None

    def _wait(self) -> Lane | None:
        if self.ending or self.pool.ended:
            return None
        while True:
            timeout = _settings.current.worker_idle_timeout
            if self.dedicated or _service.exiting:  # CPython 3.12 starts no thread while it exits
                timeout = max(timeout, 1.0)
            if self.wake.acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
                break
            with LOCK:
                if self.pool.retire(self):
                    return None
        lane, self.lane = self.lane, None
        return lane

    def _serve(self, lane: Lane, wakes: Wakes) -> None:
        order = lane._order
        _compat.set_execution_stream(lane._stream)
        began, served = monotonic(), False
        pool = self.pool
        while True:
            with LOCK:
                over = served and (pool.ready or pool.light) and monotonic() - began >= _TURN
                if (over or (self.extra and not order.light)) and not self.dedicated:
                    pool.enqueue(lane)
                    return
                call = order.running  # a coroutine, and it has ended
                if call is None:
                    call = order.next()
                    if call is None:
                        return
                    call._state = RUNNING
                    if order.room:
                        lane._admit(wakes)
                self.call = call
                watched = pool.watched
            if wakes and not self._may_wait(wakes, call, watched):
                wakes.pay()
            served = True
            settled = True
            try:
                settled = call._execute(wakes)
            except BaseException as error:
                # A bug of ours must not take the thread, the channel and the waiters with it.
                logger.exception("internal error in a worker")
                call._break_off(error, wakes)
            self.started = call._started
            self.call = None
            call = None
            if self.stuck:
                with LOCK:
                    pool.unstick(self)
            if not settled:
                return

    def _may_wait(self, wakes: Wakes, call: Job, watched: bool) -> bool:
        """Whether what is owed may wait for the body that begins now.

        A loop that wakes wants the GIL, and gets it whenever a body lets it go: between short bodies that
        costs more than they do. Should this one take long after all, the watch wakes the loops.
        """
        if wakes.only_flushes:
            return call._group is not None or ((wait := call._may_wait) is not None and wait())
        if watched and wakes.only_bridges and not self.dedicated:
            now = monotonic()
            self.owed_since = self.owed_since or now
            if now - self.started < _QUICK and now - self.owed_since < _LONGEST_OWED:
                return True
        self.owed_since = 0.0
        return False


class Pool:
    """Worker threads, and the lanes that wait for one. Methods are called under the lock."""

    def __init__(self) -> None:
        self.ready: deque[Lane] = deque()
        self.light: deque[Lane] = deque()  # need a worker for a moment, whatever the limit
        self.idle: list[Worker] = []
        self.workers: set[Worker] = set()
        self.lanes: set[Lane] = set()  # with anything queued, running or computing
        self.waiting = 0  # workers whose body waits inside the library
        self.stuck = 0  # active workers that are in one body for longer than a moment
        self.dedicated: set[Worker] = set()
        self.ended = False
        self.refused = 0.0  # when a thread could not be started
        self._numbers = 0
        self.watched = False  # whether somebody looks every moment
        self._watching = False
        self._limit_reported = False

    # -- lanes ------------------------------------------------------------------------------------

    def schedule(self, lane: Lane) -> None:
        """Hand a claimed lane to a worker.

        A thread is woken at once only if all others are stuck in their bodies. One that makes
        progress will get to the lane sooner than a second one would, for which it would have to give
        up the interpreter lock.
        """
        own = lane._worker
        if own is not None and not own.ending:
            self._hand(own, lane)
            return
        active = self._active()
        light = lane._order.light
        at_limit = active >= _settings.current.worker_limit
        if self.idle and active <= self.stuck and (light or not at_limit):
            self._hand(self.idle.pop(), lane, extra=at_limit)
            return
        if not self.ready:
            self._limit_reported = False  # whatever waited then has got its thread
        self.enqueue(lane, first=lane._nested)  # or bodies that wait for it pile up
        if not self._watching:
            self._watching = True
            if not self.workers:
                self._add_worker()
            _service.post(self._start_watch)
        elif not _service.running:  # it was refused a thread
            _service.start()

    def enqueue(self, lane: Lane, *, first: bool = False) -> None:
        """Have a lane wait for a worker."""
        lane._runnable_since = monotonic()
        queue = self.light if lane._order.light else self.ready
        if first:
            queue.appendleft(lane)
        else:
            queue.append(lane)

    def go_on(self, lane: Lane) -> None:
        """A lane's coroutine has ended (the host loop's thread): settle, and start the next one.

        Here, if that takes a moment: it saves a thread hop for each. Else a worker does it, because
        loading a body, placing arguments and checking results may take long.
        """
        order = lane._order
        wakes = Wakes()
        call = order.running
        while call is not None and call._is_quick():
            try:
                if not call._execute(wakes):
                    break
            except BaseException as error:
                logger.exception("internal error on the host's loop")
                call._break_off(error, wakes)
            with LOCK:
                quick = order.light and order.queue[0]._is_quick()
                call = order.next() if quick else None
                if call is not None:
                    call._state = RUNNING
                    if order.room:
                        lane._admit(wakes)
                elif quick:
                    pass  # `next` has given the claim up
                elif order.queue:
                    self.schedule(lane)
                else:
                    order.claimed = False
        else:
            if call is not None:
                with LOCK:
                    self.schedule(lane)
        wakes.pay()

    def take(self, lane: Lane | None = None) -> Lane | None:
        """Take a lane that waits for a worker, ``lane`` or any, out of its queue."""
        for queue in (self.light, self.ready):
            if lane is None:
                if queue:
                    return queue.popleft()
            elif lane in queue:
                queue.remove(lane)
                return lane
        return None

    def _start_watch(self) -> None:
        self.watched = True
        due = monotonic() + _PATIENCE
        _service.call_at(due, functools.partial(self._watch, due))

    @staticmethod
    def _hand(worker: Worker, lane: Lane, *, extra: bool = False) -> None:
        worker.lane = lane
        worker.extra = extra
        worker.wake.release()

    def next_lane(self, worker: Worker) -> Lane | None:
        """A lane for a worker that has none, or note that it is idle."""
        if not (worker.dedicated or self.ended):
            worker.extra = self._active() > _settings.current.worker_limit
            if self.light:
                return self.light.popleft()
            if self.ready and not worker.extra:
                return self.ready.popleft()
            self.idle.append(worker)
        return None

    def retire(self, worker: Worker) -> bool:
        """Let an idle worker end, unless a lane was handed to it meanwhile."""
        if worker.owner is not None:
            if worker.owner() is not None:
                return False
            self.dedicated.discard(worker)  # its channel was dropped without being closed
            return True
        if _service.exiting or worker not in self.idle:
            return False
        self.idle.remove(worker)
        self.workers.discard(worker)
        return True

    # -- threads ------------------------------------------------------------------------------------

    def _active(self) -> int:
        return len(self.workers) - len(self.idle) - self.waiting

    def _add_worker(self, lane: Lane | None = None) -> Worker:
        worker = Worker(self, lane)
        worker.extra = self._active() >= _settings.current.worker_limit
        self.workers.add(worker)
        self._numbers += 1
        name = f"aiocolocated-worker-{self._numbers}"
        _service.start_thread(worker.run, name, functools.partial(self._not_started, worker))
        return worker

    def _not_started(self, worker: Worker) -> None:
        """The system, or the exiting interpreter, refused a thread: its lane waits for another."""
        with LOCK:
            self.workers.discard(worker)
            self.refused = monotonic()
            if worker.first is not None:
                self.enqueue(worker.first, first=True)
                if not self._watching:  # it ended while nothing seemed to wait
                    self._watching = True
                    _service.post(self._start_watch)

    def add_dedicated(self, name: str, lane: Lane) -> Worker:
        """A worker for one lane, outside the limit."""
        worker = Worker(self, None, dedicated=True)
        worker.owner = weakref.ref(lane)
        self.dedicated.add(worker)
        self._start_dedicated(worker, f"aiocolocated-channel-{name}")
        return worker

    def _start_dedicated(self, worker: Worker, name: str) -> None:
        refused = functools.partial(self._dedicated_not_started, worker, name)
        _service.start_thread(worker.run, name, refused)

    def _dedicated_not_started(self, worker: Worker, name: str) -> None:
        """Try again or, where no thread is started any more, serve the lane as any other."""
        with LOCK:
            if not _service.exiting:
                start = functools.partial(self._start_dedicated, worker, name)
                again = monotonic() + _REFUSED_PAUSE
                _service.post(functools.partial(_service.call_at, again, start))
                return
            self.refused = monotonic()
            self.dedicated.discard(worker)
            worker.ending = True
            if worker.lane is not None:
                self.enqueue(worker.lane)

    def _watch(self, due: float) -> None:
        """Wake or add threads while lanes wait and no worker makes progress (service thread)."""
        report: str | None = None
        with LOCK:
            owed = {bridge for worker in self.workers for bridge in worker.wakes.bridges}
            if self.ready or self.light:
                now = monotonic()
                pause = _PATIENCE
                self._look_for_stuck(now, on_time=now - due < _PATIENCE)
                if self._active() <= self.stuck:
                    report = self._grow(now)
                    if report is not None or self._active() >= _settings.current.worker_limit:
                        pause = 0.02
                self.watched = pause == _PATIENCE
                _service.call_at(now + pause, functools.partial(self._watch, now + pause))
            else:
                self._watching = self.watched = False
        for bridge in owed:
            bridge.notify()
        if report:
            logger.warning("%s", report)

    def _look_for_stuck(self, now: float, *, on_time: bool) -> None:
        """Note which workers have been in one body for longer than a moment.

        A look that comes late says that threads wait for the interpreter lock, and a worker that
        does is not stuck: only what was the same at the look before counts then.
        """
        for worker in self.workers:
            call = worker.call
            if call is None or worker.stuck or worker.waiting:
                continue
            if now - call._started >= _PATIENCE and (on_time or worker.seen == call._started):
                worker.stuck = True
                self.stuck += 1
            worker.seen = call._started  # not the call, which holds its result

    def _grow(self, now: float) -> str | None:
        """Give waiting lanes to idle or new threads, twice as many each time; or say the limit."""
        settings = _settings.current
        if self.light:
            if self.idle:
                self._hand(self.idle.pop(), self.light.popleft(), extra=True)
            elif self._may_add(now):
                self._add_worker(self.light.popleft())
            return None
        room = settings.worker_limit - self._active()
        if room <= 0:
            waited = now - min(self.ready[0]._runnable_since, self.ready[-1]._runnable_since)
            if waited < _LIMIT_WARNING or self._limit_reported:
                return None
            self._limit_reported = True
            return self._limit_report(now)
        for _ in range(min(room, len(self.ready), max(1, self._active()))):
            if self.idle:
                self._hand(self.idle.pop(), self.ready.popleft())
            elif self._may_add(now):
                self._add_worker(self.ready.popleft())
        return None

    def _may_add(self, now: float) -> bool:
        ceiling = _settings.current.worker_ceiling
        return len(self.workers) < ceiling and now - self.refused >= _REFUSED_PAUSE

    def unstick(self, worker: Worker) -> None:
        if worker.stuck:
            worker.stuck = False
            self.stuck -= 1

    def _limit_report(self, now: float) -> str:
        running = ", ".join(
            f"{call._describe()} for {now - call._started:.1f} s"
            for worker in self.workers
            if (call := worker.call) is not None
        )
        queued = sum(lane._order.pending for lane in self.lanes)
        return (
            f"all {_settings.current.worker_limit} workers (worker_limit) have been busy for over "
            f"{_LIMIT_WARNING} s while {queued} calls are queued in {len(self.ready)} waiting "
            f"channels; running: {running or 'nothing'}. Bodies that wait for each other need "
            "configure(worker_limit=...) of at least their number."
        )

    # -- waits inside bodies --------------------------------------------------------------------------

    def begin_wait(self, worker: Worker) -> bool:
        """Give the slot of a waiting body back; false beyond the ceiling."""
        if self.waiting + 1 >= _settings.current.worker_ceiling:
            return False
        worker.waiting += 1
        if worker.waiting == 1 and not worker.dedicated:
            self.unstick(worker)
            self.waiting += 1
            if queue := self.light or self.ready:
                if self.idle:
                    self._hand(self.idle.pop(), queue.popleft())
                elif self._active() < _settings.current.worker_limit and self._may_add(monotonic()):
                    self._add_worker(queue.popleft())
        return True

    def end_wait(self, worker: Worker) -> None:
        """The body goes on; for a moment more bodies than the limit may run."""
        worker.waiting -= 1
        if worker.waiting == 0 and not worker.dedicated:
            self.waiting -= 1

    def stands_still(self) -> bool:
        """Whether every worker waits, or is in one body for longer than a moment."""
        return self._active() <= self.stuck

    def serve_here(self, lane: Lane) -> None:
        """Serve a lane on this thread: at exit, when no thread can be started."""
        call = local.call
        wakes = Wakes()
        Worker(self, None, dedicated=True)._serve(lane, wakes)
        local.call = call
        if call is not None:
            _compat.set_execution_stream(call._channel._stream)
        wakes.pay()

    def wait_at_exit(self, lock: threading.Lock, timeout: float, lane: Lane) -> bool:
        """Acquire ``lock`` in a body, doing what no other thread may be left to do: serve ``lane``."""
        deadline = monotonic() + timeout
        while not lock.acquire(timeout=_PATIENCE):
            with LOCK:
                stranded = self.refused and self.take(lane) is not None
            if stranded:
                self.serve_here(lane)
            _service.serve_here()
            if timeout >= 0 and monotonic() >= deadline:
                return False
        return True

    # -- exit -----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Let all threads end; nothing is in flight any more."""
        self.ended = True
        for worker in (*self.idle, *self.dedicated):
            self.workers.discard(worker)
            self.release(worker)
        self.idle.clear()

    def release(self, worker: Worker) -> None:
        """End a worker that has nothing to do: a dedicated one whose lane is closed, or at exit."""
        self.dedicated.discard(worker)
        if not worker.ending:
            worker.ending = True
            if worker.lane is None:  # else it is awake already, to find nothing to run
                worker.wake.release()


pool = Pool()
