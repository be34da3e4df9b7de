# SPDX-License-Identifier: Apache-2.0
"""Calls that run on other hosts: their answers, and one outcome of several."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from aiocolocated import _compat_hosts, _service
from aiocolocated._exceptions import (
    ArgumentError,
    CallCancelledError,
    ChannelStoppedError,
    HostLostError,
    SpecError,
)
from aiocolocated._execution import RunnableCall
from aiocolocated._loops import Wakes
from aiocolocated._owners import FailureReport
from aiocolocated._settings import LOCK
from aiocolocated._submission import stopped_error
from aiocolocated.hosts import _wire
from aiocolocated.hosts._references import FUTURE, Reference, reference_of

if TYPE_CHECKING:
    from aiocolocated.hosts._groups import Group
    from aiocolocated.hosts._links import Link

_FAILURE_GRACE = 1.0  # seconds that other hosts have to fail, too, before the call does
_NONE = pickle.dumps(None, 5)


class Forwarded:
    """A call that runs on other hosts."""

    __slots__ = (
        "answers",
        "call",
        "dispatched",
        "future",
        "group",
        "late",
        "number",
        "plan",
        "value",
    )

    def __init__(self, call: RunnableCall, group: Group, number: int, plan: Any) -> None:
        self.call = call
        self.group = group
        self.number = number
        self.plan = plan
        self.future = Reference(group, number, FUTURE)
        self.answers: dict[Link, Any] = {}
        self.dispatched = False
        self.value: Any = None
        self.late: BaseException | None = None  # of the clean-up after it was cancelled

    def cancel(self, wakes: Wakes) -> None:
        """Have the hosts cancel it, unless one that has begun would wait for the others."""
        if self.group.collective:
            return
        for link in self.group.links:
            if self.number in link.calls:
                link.post((_wire.CANCEL, self.number), wakes)

    def answer(self, link: Link, message: Any, wakes: Wakes) -> None:
        """A host has answered, or is lost (the thread that receives)."""
        if message[0] is None and self.plan.dropped:  # what was to be closed is gone, as was wanted
            message = (_wire.DONE, self.number, (), _NONE, ())
        kind = message[0]
        if kind is None and len(self.group.links) > 1:
            with LOCK:  # at once, whatever the others do
                self.call._fail(wakes, self._lost(message[2]), None)
                self.cancel(wakes)
        before = self.answers.get(link)
        if before is not None:
            if kind == _wire.DONE:  # the value has come with DISPATCHED
                message = (kind, message[1], *before[2:])
            elif not self.dispatched:
                self._release_result(link)
        self.answers[link] = message
        if kind == _wire.CANCELLED and message[3] is not None and self.late is None:
            late = self.group.hosts.load_error(message[3], link.name)
            self.late = self.call._as_error(late)
        if len(self.answers) < len(self.group.links):
            if kind == _wire.FAILED and len(self.answers) == 1:  # others may wait for it for ever
                give_up = monotonic() + _FAILURE_GRACE
                _service.post(partial(_service.call_at, give_up, self._fail_early))
            return
        error: BaseException | None = None
        value = None
        try:
            value = self._outcome()
        except BaseException as caught:
            error = self.call._as_error(caught)
            self._release_results()
        final = all(m[0] != _wire.DISPATCHED for m in self.answers.values())
        if error is not None:
            self._look_for_break(wakes, error)
            if not final:
                return
        if type(error) is ChannelStoppedError:
            error = self._stopped(error)
        with LOCK:
            computing.pop(self.number, None)
            if final:
                self.call._over_there(value, error, self.dispatched, wakes)
            elif not self.dispatched:
                self.dispatched = True
                self.value = value
                computing[self.number] = self.call
                self.call._dispatched_there(value, wakes)
        del error, value

    def _release_results(self) -> None:
        """Nobody will have what some hosts gave. What was unpacked in part may still be looked at."""
        for link, message in self.answers.items():
            if message[0] in (_wire.DISPATCHED, _wire.DONE):
                self._release_result(link)

    def _release_result(self, link: Link) -> None:
        for key in self.answers[link][4]:
            link.release(key, reuse=False)

    def _look_for_break(self, wakes: Wakes, error: BaseException) -> None:
        """Give a cluster up if a call over several of its hosts has failed on some of them only.

        The programs of the others may wait for it for ever or, which is worse, meet those of a later call.
        """
        if not self.group.collective or self.call._gate is not self.group.hosts.collective_gate:
            return
        links = self.group.links
        failed = {link: m[2] for link, m in self.answers.items() if m[0] == _wire.FAILED}
        # The same exception everywhere is that of one program, at one place of it.
        if not failed or (
            len(failed) == len(links) and len({parts[1:3] for parts in failed.values()}) == 1
        ):
            return
        names = ", ".join(link.name for link in links if link in failed)
        why = (
            f"{self.plan.name} failed on {names} with {next(iter(failed.values()))[1]}, and not in the same "
            "way on every host of the call, whose programs would wait for each other"
        )
        with LOCK:
            self.call._fail(wakes, error, None)
        self.group.hosts.broken(why)

    def _fail_early(self) -> None:
        """It has failed on some hosts, and others have not answered for a moment (service thread)."""
        silent = [link.name for link in self.group.links if link not in self.answers]
        if not silent:
            return
        try:
            self._outcome()
        except BaseException as caught:
            error = self.call._as_error(caught)
            error.add_note(f"{', '.join(silent)} had not answered yet")
            wakes = Wakes()
            with LOCK:
                self.call._fail(wakes, error, None)
            self._look_for_break(wakes, error)
            wakes.pay()

    def _stopped(self, error: BaseException) -> BaseException:
        """The host says that an earlier call stopped the channel; which one it was is known here."""
        channel: Any = self.call._channel
        if (cause := channel._order.stopped) is None:
            return error
        with LOCK:
            self.call._report = FailureReport(error, self.call._describe(), None)
            self.call._report.retrieve()  # the failure behind it is reported, not each victim
        return stopped_error(channel.name, cause)

    def _lost(self, error: HostLostError) -> HostLostError:
        return HostLostError(*error.args)  # one for each call, which is to have notes of its own

    def _outcome(self) -> Any:
        """What the body gave, or raises what it raised."""
        answers = self.answers
        errors: list[BaseException] = []
        cancelled: BaseException | None = None
        for link, message in answers.items():
            kind = message[0]
            if kind is None:
                errors.append(self._lost(message[2]))
            elif kind == _wire.FAILED:
                errors.append(self.group.hosts.load_error(message[2], link.name))
            elif kind == _wire.CANCELLED:
                cancelled = CallCancelledError(message[2])
        if len(errors) == 1 or (errors and self.group.collective and self._all_lost(errors)):
            raise errors[0]  # of a cluster the others are lost with the first
        if errors:
            what = f"{self.plan.name} failed on {len(errors)} hosts"
            raise BaseExceptionGroup(what, errors)
        if cancelled is not None:
            raise cancelled
        if self.dispatched:
            return self.value
        value, _ = self.plan.finish(self._value())
        return value

    @staticmethod
    def _all_lost(errors: Sequence[BaseException]) -> bool:
        return all(isinstance(error, HostLostError) for error in errors)

    def _value(self) -> Any:
        links = self.group.links
        # One for all hosts: the first to go would free what the others refer to.
        references: dict[int, Reference] = {}
        if self.plan.reduce is not None:
            return self.plan.reduce([self._value_of(link, references) for link in links])
        value = self._value_of(links[0], references)
        for link in links[1:]:
            if not self._agrees(link, value):
                raise SpecError(
                    f"{self.plan.name} returned different results on {links[0].name} and {link.name}. "
                    "Return global arrays and equal values, or say how they are put together: "
                    "specialize(reduce='list')"
                )
        return value

    def _value_of(self, link: Link, references: dict[int, Reference]) -> Any:
        """What a host gave, with handles for its arrays."""
        hosts = self.group.hosts
        _, _, specs, data, _ = self.answers[link]
        handles: list[Any] = []
        for leaf, spec in enumerate(specs):
            if leaf not in references:
                references[leaf] = hosts.array_reference(self.group, self.number, leaf)
            handle = _compat_hosts.make_handle(*link.specs[spec])
            handle._aiocolocated = references[leaf]
            handles.append(handle)
        return handles[0] if data is None else self._load(data, handles)

    def _load(self, data: bytes, things: Sequence[Any]) -> Any:
        try:
            return self.group.hosts.load(data, things)
        except Exception as error:
            raise ArgumentError(
                f"what {self.plan.name} returned cannot be unpickled in this process: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _agrees(self, link: Link, value: Any) -> bool:
        """Whether a host gave the same as the first one, whose value this is."""
        first = self.group.links[0]
        _, _, specs, data, _ = self.answers[first]
        _, _, other_specs, other_data, _ = self.answers[link]
        if [first.specs[i] for i in specs] != [link.specs[i] for i in other_specs]:
            return False
        if data == other_data:
            return True
        if data is None or other_data is None:
            return False
        # Equal values may be pickled in different ways: each process has its own order of sets.
        return _equal(value, self._load(other_data, [_Array(i) for i in range(len(specs))]))


class _Array:
    """Stands for an array where results are compared."""

    def __init__(self, leaf: int) -> None:
        self.leaf = leaf


def _equal(value: Any, other: Any) -> bool:
    leaves, tree = jax.tree_util.tree_flatten(value)
    others, other_tree = jax.tree_util.tree_flatten(other)
    same: Any = tree == other_tree  # type: ignore[operator]
    return bool(same) and all(map(_equal_leaves, leaves, others))


def _equal_leaves(a: Any, b: Any) -> bool:
    if type(b) is _Array:
        return isinstance(a, jax.Array) and reference_of(a).leaf == b.leaf
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return bool(a == b)


# Calls whose arrays are still computing on their hosts, by number: their handles are not ready.
computing: dict[int, Any] = {}


def calls_behind(leaves: Sequence[Any]) -> list[Any]:
    """The calls that still compute some handles, each once."""
    found: dict[int, Any] = {}
    for leaf in leaves:
        reference = getattr(leaf, "_aiocolocated", None)
        if type(reference) is Reference and (call := computing.get(reference.number)) is not None:
            found[reference.number] = call
    return list(found.values())
