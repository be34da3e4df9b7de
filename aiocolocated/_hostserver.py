# SPDX-License-Identifier: Apache-2.0
"""The server of a host process: takes a controller's messages, and answers them.

Calls that arrive become ordinary calls of this process's own in-process host, in channels that stand for
the controller's: order, cancellation, coroutines and objects are those of any other program.
"""

from __future__ import annotations

import logging
import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any

import jax

from aiocolocated import _compat, _contexts, _service, _specs
from aiocolocated._calls import Call
from aiocolocated._channels import TaskChannel, new_channel
from aiocolocated._exceptions import HostError
from aiocolocated._futures import ArrayFuture
from aiocolocated._hostplans import (
    HostCode,
    HostedObject,
    HostMethod,
    HostPlan,
    HostSpecialization,
    Result,
)
from aiocolocated._lifetimes import HERE
from aiocolocated._loops import Wakes
from aiocolocated._settings import LOCK
from aiocolocated._sources import END, Source
from aiocolocated._specializations import FunctionCode, Specialization
from aiocolocated._submission import submit
from aiocolocated._types import CANCELLED, DISPATCHED, FAILED, READY
from aiocolocated.hosts import _parcels, _wire
from aiocolocated.hosts._output import ForwardingHandler
from aiocolocated.hosts._references import CODE, FUTURE, STREAM

_MOST_DEFERRED = 32  # answers that are sent together while bodies follow each other
_LONGEST_DEFERRED = 0.001  # seconds


class Answer:
    """Tells the controller how far a call is, and then what came of it."""

    __slots__ = ("_call", "_number", "_plan", "_server", "_told", "late")

    def __init__(self, server: Server, number: int, call: Call) -> None:
        self._plan = call._plan  # that of a stream's first step is another one later
        self._server = server
        self._number = number
        self._call: Call | None = call
        self._told = False
        self.late: BaseException | None = None  # of the clean-up after it was cancelled

    def wake(self, wakes: Wakes) -> None:
        """The body has returned (under the lock)."""
        call = self._call
        if call is not None and call._state == DISPATCHED:
            self._told = True
            self._server.answer(_wire.DISPATCHED, self._number, call._value, wakes)

    def over(self, wakes: Wakes) -> None:
        """Nothing of the call runs any more (under the lock)."""
        call, self._call = self._call, None
        assert call is not None
        if self._has_parcels():
            wakes.callback(self.release)
        if call._state == FAILED:
            if call._report is not None:
                call._report.retrieve()
            self._server.answer(_wire.FAILED, self._number, call._value, wakes)
        elif call._state == CANCELLED:
            self._server.answer(_wire.CANCELLED, self._number, (call._value, self.late), wakes)
        elif self._told:
            self._server.answer(_wire.DONE, self._number, _Same, wakes)
        else:
            self._server.answer(_wire.DONE, self._number, call._value, wakes)

    def _has_parcels(self) -> bool:
        return type(self._plan) is HostPlan and bool(self._plan.keys)

    def release(self) -> None:
        """The call is over: what has not been unpacked never will be (without the lock)."""
        plan: Any = self._plan
        if self._has_parcels():
            plan.release()


def _number_of(answer: tuple[int, int, Any]) -> int:
    return answer[1]


class _Same:
    """Stands for the value that was told already."""


class Server:
    """Serves one controller: takes its messages, and answers them."""

    def __init__(
        self, name: str, transmit: Callable[[bytes], None], *, collectives: bool = False
    ) -> None:
        self.name = name
        # One for all calls over several hosts, whose order must be that of the other hosts.
        self._collective = TaskChannel("collectives") if collectives else None
        self._transmit = transmit
        self._codes: dict[int, FunctionCode] = {}
        self._objects: dict[int, HostedObject] = {}
        self._streams: dict[int, Source] = {}  # by the number of the first step
        self._plans: dict[int, dict[tuple[int, ...], Specialization]] = {}  # by code and devices
        self._devices = {device.id: device for device in jax.devices()}
        self._channels: weakref.WeakValueDictionary[int, TaskChannel] = (
            weakref.WeakValueDictionary()
        )
        self._kept: dict[int, TaskChannel] = {}  # channels with state beyond their calls
        self._calls: dict[int, ArrayFuture[Any]] = {}
        self._arrays: dict[tuple[int, int], Any] = {}
        self._class_messages: dict[str, Any] = {}
        self._peer = _Peer(self)
        self._answers: list[tuple[int, int, Any]] = []
        self._deferred = False
        self._send_lock = threading.Lock()
        self._logs = ForwardingHandler(self._send_logs)
        self._specs: dict[Any, int] = {}
        self._outgoing: list[Any] = []
        self._handlers: dict[int, Callable[..., None]] = {
            _wire.CALL: self._call,
            _wire.FUNCTION: self._function,
            _wire.CLASS: self._class_message,
            _wire.OBJECT: self._object,
            _wire.METHOD: self._method,
            _wire.STEP: self._step,
            _wire.CANCEL: self._cancel,
            _wire.FORGET: self._forget,
            _wire.CHANNEL: self._channel_options,
            _wire.PING: self._ping,
            _wire.RELEASE: self._release,
        }

    # -- messages from the controller (the thread that receives) -------------------------------------------

    def receive(self, data: bytes) -> None:
        """Do what a message says; one that cannot be read is reported and left."""
        try:
            messages = list(pickle.loads(data))
        except Exception:
            _service.logger.exception("%s: a message cannot be read", self.name)
            return
        for message in messages:
            try:
                self._handlers[message[0]](*message[1:])
            except Exception:
                _service.logger.exception("%s: a message cannot be followed", self.name)

    def _function(self, number: int, kind: str, name: str, data: bytes, words: Any) -> None:
        things = self._things(words)
        self._codes[number] = HostCode(kind, name, lambda: self.load(data, things))

    def _object(
        self,
        number: int,
        cls: int,
        name: str,
        options: Any,
        data: bytes,
        words: Any,
        keys: tuple[int, ...],
    ) -> None:
        things = self._things(words)
        code: Any = self._codes[cls]
        self._objects[number] = HostedObject(
            name, code, options, lambda: self.load(data, things), partial(self._release_all, keys)
        )

    def _release_all(self, keys: tuple[int, ...]) -> None:
        for key in keys:
            self.release(key, reuse=False)

    def _method(self, number: int, of: int, kind: str, name: str, data: bytes) -> None:
        owner = self._objects[of]
        method = HostMethod(owner, kind, name, lambda: self.load(data, ()))
        self._codes[number] = owner.methods[str(number)] = method

    def _class_message(self, class_id: str, data: bytes, words: Any) -> None:
        self._class_messages[class_id] = (data, self._things(words))
        self._peer.classes.add(class_id)

    def _things(self, words: Sequence[Any]) -> list[Any]:
        return [self._calls[word] if type(word) is int else self._arrays[word] for word in words]

    def _call(
        self,
        number: int,
        code: int,
        channel: int,
        place: tuple[int, ...],
        data: bytes | None,
        words: Any,
        state: bytes | None,
        keys: tuple[int, ...],
    ) -> None:
        try:
            call = self._make_call(code, channel, place, data, words, state, keys)
        except Exception as error:
            self._release_all(keys)
            what = f"{self.name} cannot follow a call, which is a bug of aiocolocated: {error!r}"
            unknown = HostError(what)  # not the error itself, which looks like one of the body's
            unknown.__cause__ = error
            self._fail(number, unknown)
            return
        answer = Answer(self, number, call)
        base = self._codes[code]
        if "generator" in base.kind:
            where: Any = call._channel
            source = self._streams[number] = Source(base, None, where)
            source.open(call)
            if base.object is not None:
                base.object.streams.add(source)
            self._submit(number, call, answer, source.submit)
        else:
            self._submit(number, call, answer, submit)

    def _submit(
        self,
        number: int,
        call: ArrayFuture[Any],
        answer: Answer,
        submit: Callable[[ArrayFuture[Any]], object],
    ) -> None:
        call._dispatch_waiters = [answer]
        call._may_wait = self.defer
        call._waiter_count = 1
        call._release = answer.over
        self._calls[number] = call
        try:
            submit(call)
        except Exception as error:
            answer.release()
            self._fail(number, error)

    def _step(self, number: int, of: int, closing: bool, dropped: bool) -> None:
        """Take the next step of a stream, or close a stream or object."""
        source = self._streams.get(of)
        if closing:
            thing = source or self._objects.get(of)
            self._answer_when_over(number, None if thing is None else thing.close(dropped=dropped))
        elif source is None:  # its first step was refused
            wakes = Wakes()
            with LOCK:
                self.answer(_wire.DONE, number, END, wakes)
            wakes.pay()
        else:
            step = source.step(None, HERE, 0)
            self._submit(number, step, Answer(self, number, step), source.submit)

    def _answer_when_over(self, number: int, call: ArrayFuture[Any] | None) -> None:
        wakes = Wakes()
        with LOCK:
            if call is None:
                self.answer(_wire.DONE, number, None, wakes)
            else:
                answer = Answer(self, number, call)
                if call._state >= READY:
                    answer.over(wakes)
                else:
                    call._release = answer.over
        wakes.pay()

    def _make_call(
        self,
        code: int,
        channel: int,
        place: tuple[int, ...],
        data: bytes | None,
        words: Any,
        state: bytes | None,
        keys: tuple[int, ...],
    ) -> ArrayFuture[Any]:
        things = self._things(words)
        plans = self._plans.get(code)
        if plans is None:
            plans = self._plans[code] = {}
        plan: Any = plans.get(place)
        if plan is None:
            devices = tuple(self._devices[i] for i in place)
            plan = HostSpecialization(self, self._codes[code], devices)
            plans[place] = plan
        args: tuple[Any, ...] = ()
        if data is None:
            args = tuple(things)
        else:
            plan = HostPlan(self, plan, data, things, keys)
        where = self._channels.get(channel)
        if self._collective is not None and len({d.process_index for d in plan.devices}) > 1:
            where = self._collective
        if where is None:
            where = self._channels[channel] = new_channel(f"channel-{channel} of the controller")
        call: ArrayFuture[Any] = ArrayFuture._create(plan, args, {}, where, None, None, HERE, 0)
        call._config = None
        if data is not None:
            call._convert = True
            call._futures = plan.futures((), {}) or None
            plan = plan.plan
        if state is not None:
            config, options = self.load(state, ())
            if config:
                call._config = _compat.snapshot_from_names(config)
            if options:
                assert call._context is not None
                call._context.run(_contexts.scope.set, options)
        if plan.special:
            plan.mark(call)
        return call

    def _fail(self, number: int, error: BaseException) -> None:
        wakes = Wakes()
        with LOCK:
            self.answer(_wire.FAILED, number, error, wakes)
        wakes.pay()

    def _cancel(self, number: int) -> None:
        call = self._calls.get(number)
        if call is not None:
            call.cancel()

    def _forget(self, pairs: Sequence[tuple[int, int]]) -> None:
        for number, leaf in pairs:
            if leaf == FUTURE:
                self._calls.pop(number, None)
            elif leaf == CODE:
                self._kept.pop(number, None)
                self._objects.pop(number, None)
                if self._codes.pop(number, None) is not None:
                    self._plans.pop(number, None)
            elif leaf == STREAM:
                self._streams.pop(number, None)
            else:
                self._arrays.pop((number, leaf), None)

    def _release(self, key: int, reuse: bool) -> None:
        _parcels.released(key, self, reuse)

    def release(self, key: int, reuse: bool) -> None:
        """Tell the controller that a parcel of its is not needed any more (any thread)."""
        with self._send_lock:
            self._transmit(pickle.dumps([(_wire.RELEASED, key, reuse)], 5))

    def _channel_options(self, number: int, channel: int, options: dict[str, Any]) -> None:
        self._kept[number] = self._channels[channel] = TaskChannel(**options)

    def _ping(self, number: int) -> None:
        with self._send_lock:
            self._transmit(pickle.dumps([(_wire.PONG, number)], 5))

    # -- answers (any thread) --------------------------------------------------------------------------------

    def answer(self, kind: int, number: int, value: Any, wakes: Wakes) -> None:
        """Have something told to the controller (under the lock)."""
        self._answers.append((kind, number, value))
        wakes.flush(self.flush)

    def defer(self) -> bool:
        """Whether answers may wait while a worker begins the next body: that may be the last of many.

        They do not wait longer than a moment, however long that body takes.
        """
        if len(self._answers) >= _MOST_DEFERRED:
            return False
        if not self._deferred:
            self._deferred = True
            _service.inbox.put(self._flush_soon)
        return True

    def _flush_soon(self) -> None:
        _service.call_at(monotonic() + _LONGEST_DEFERRED, self._flush_deferred)

    def _flush_deferred(self) -> None:
        self._deferred = False
        self.flush()

    def flush(self) -> None:
        """Send what there is to tell (without the lock)."""
        while self._answers:
            with self._send_lock:
                with LOCK:
                    answers, self._answers = self._answers, []
                # A call that fails with what it depends on is settled before that.
                answers.sort(key=_number_of)
                messages = self._take_logs()  # what a body logs comes before its result
                for kind, number, value in answers:
                    message = self._message(kind, number, value)
                    with LOCK:  # specs and classes that it needs
                        messages += self._outgoing
                        self._outgoing = []
                    messages.append(message)
                if messages:
                    self._transmit(pickle.dumps(messages, 5))
                del answers, messages

    def forward_logs(self) -> None:
        """Have log records of this process handled by the controller's loggers."""
        root = logging.getLogger()
        root.addHandler(self._logs)

    def _take_logs(self) -> list[Any]:
        return [(_wire.LOG, record) for record in self._logs.take()]

    def _send_logs(self) -> None:
        """Send log records that no answer has taken along (service thread)."""
        with self._send_lock:
            records = self._take_logs()
            if records:
                self._transmit(pickle.dumps(records, 5))

    def _message(self, kind: int, number: int, value: Any) -> Any:
        if kind == _wire.CANCELLED:
            cancelled, late = value
            parts = None if late is None else _wire.dump_error(late, self._peer)
            return (kind, number, str(cancelled), parts)
        if kind == _wire.FAILED:
            return (kind, number, _wire.dump_error(value, self._peer))
        if value is _Same:
            return (kind, number, (), None, ())
        if type(value) is _compat.ArrayImpl:
            self._arrays[number, 0] = value
            return (kind, number, (self._spec(value),), None, ())
        result = value if type(value) is Result else self.pickle_result(value, "a result")
        for leaf, array in enumerate(result.arrays):
            self._arrays[number, leaf] = array
        specs = tuple(self._spec(array) for array in result.arrays)
        with LOCK:
            for parcel in result.pickled.parcels:
                parcel.claim((self,))
        return (kind, number, specs, result.pickled.data, result.pickled.keys)

    def pickle_result(self, value: Any, where: str) -> Result:
        """Pickle what a body returned (worker thread).

        Raises:
            ArgumentError: it cannot be sent.
        """
        if type(value) is _wire.Plain:
            return Result(value, value.pickled(), [])
        peer = _Peer(self, self._peer.classes)
        try:
            pickled = _wire.dumps(value, peer)
        except Exception as error:
            raise _wire.describe_failure(error, where, value, _specs.result_path, peer) from error
        return Result(value, pickled, peer.arrays)

    def _spec(self, array: Any) -> int:
        key = (array.shape, array.dtype, array.sharding)
        spec = self._specs.get(key)
        if spec is None:
            spec = self._specs[key] = len(self._specs)
            data = _wire.dumps(key, self._peer).data
            with LOCK:
                self._outgoing.append((_wire.SPEC, spec, data))
        return spec

    def tell_class(self, class_id: str, data: bytes) -> None:
        with LOCK:
            self._outgoing.append((_wire.KNOWN_CLASS, class_id, data))

    def load(self, data: bytes, things: Sequence[Any]) -> Any:
        return _wire.loads(data, things, self._find_class)

    def _find_class(self, class_id: str) -> type:
        found = _wire.known_class(class_id)
        if found is None:
            if class_id not in self._class_messages:
                raise HostError(f"class {class_id} is not known to {self.name}")
            found = self.load(*self._class_messages[class_id])
        assert isinstance(found, type)
        return found


class _Peer(_wire.Peer):
    """What the controller knows."""

    def __init__(self, server: Server, classes: set[str] | None = None) -> None:
        super().__init__()
        if classes is not None:
            self.classes = classes
        self._server = server
        self.arrays: list[Any] = []

    def array(self, array: Any) -> Any:
        self.arrays.append(array)
        return len(self.arrays) - 1

    def define_class(self, class_id: str, cls: type) -> None:
        self._server.tell_class(class_id, _wire.dumps_class(cls, self).data)
