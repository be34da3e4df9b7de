# SPDX-License-Identifier: Apache-2.0
"""What goes over the wire between a controller and a host: messages, and the values in them.

A message is a pickled list of plain tuples, each of which begins with what it is. Values of the user's
are pickled on their own and travel as bytes: one that cannot be read fails its own call only.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import threading
import traceback
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import jax
import numpy as np

from aiocolocated import _compat, _serialization
from aiocolocated._exceptions import ArgumentError, HostError, RemoteError
from aiocolocated._values import Late
from aiocolocated.hosts._parcels import Packed, Parcel, array_parcel, first_array, only_array

# Controller to host.
FUNCTION, METHOD, OBJECT, CLASS, CALL, STEP, CANCEL, FORGET, CHANNEL, PING, RELEASE = range(11)
# Host to controller.
DISPATCHED, DONE, FAILED, CANCELLED, SPEC, PONG, KNOWN_CLASS, RELEASED, LOG = range(9)

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, tuple, list, dict, set})


# --- classes that cannot be imported ------------------------------------------------------------------

# Of every process one copy, however often they travel, so that instances that come back are instances.
_ids: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
_classes: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
_lock = threading.RLock()


def _make_class(class_id: str, skeleton: Callable[..., type], *args: Any) -> type:
    """A class as yet without its attributes, known by its id at once: it may refer to itself."""
    with _lock:
        made = _classes.get(class_id)
        if made is None:
            made = skeleton(*args)
            _ids[made] = class_id
            _classes[class_id] = made
    return made


def id_of_class(cls: type) -> str:
    """What both sides call a class."""
    with _lock:
        class_id = _ids.get(cls)
        if class_id is None:
            class_id = _ids[cls] = uuid.uuid4().hex
            _classes[class_id] = cls
    return class_id


def known_class(class_id: str) -> type | None:
    return _classes.get(class_id)


# --- pickling -----------------------------------------------------------------------------------------

_reducers: dict[type, Callable[[Any], Any]] = {}


def register_reducer(kind: type, reduce: Callable[[Any], Any]) -> None:
    """How instances of a class of the library's own travel to other hosts."""
    _reducers[kind] = reduce


_class_reducers: dict[type, Callable[[Any], Any]] = {}


def register_class_reducer(base: type, reduce: Callable[[Any], Any]) -> None:
    """How classes of the library's own making, derived from ``base``, travel to other hosts."""
    _class_reducers[base] = reduce


def _class_reducer(cls: type) -> Callable[[Any], Any] | None:
    for base, reduce in _class_reducers.items():
        if issubclass(cls, base) and not _serialization._is_found(cls):
            return reduce
    return None


class Peer:
    """What the other side of a connection knows: classes, and arrays, by a word for each."""

    def __init__(self) -> None:
        self.classes: set[str] = set()  # that it has

    def array(self, array: Any) -> Any:
        """The word for an array that the other side can find, or ``None``: then it goes by value."""
        raise NotImplementedError

    def define_class(self, class_id: str, cls: type) -> None:
        """Tell the other side about a class."""
        raise NotImplementedError


class Pickled:
    """A pickled value: bytes, the words for what it refers to, parcels."""

    __slots__ = ("data", "held", "parcels", "words")

    def __init__(
        self, data: bytes, words: tuple[Any, ...], parcels: list[Parcel], held: list[Any]
    ) -> None:
        self.data = data
        self.words = words
        self.parcels = parcels  # to be claimed when it is sent
        self.held = held  # what must live until it has been sent

    @property
    def keys(self) -> tuple[int, ...]:
        """What the receiver has to release, also if it never unpickles this."""
        return tuple(parcel.key for parcel in self.parcels if parcel.is_own)


class _Pickler(_serialization._Pickler):
    def __init__(self, file: io.BytesIO, peer: Peer, copied: type | None = None) -> None:
        cloudpickle.Pickler.__init__(self, file, protocol=5)
        self._copied = copied
        self._peer = peer
        self._numbers: dict[int, int] = {}
        self.words: list[Any] = []
        self.parcels: list[Parcel] = []
        self.held: list[Any] = []

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _PLAIN:
            return None
        if kind is Late:
            return self._word(obj, obj)
        if kind is _compat.ArrayImpl:
            number = self._numbers.get(id(obj))
            if number is not None:
                return number
            word = self._peer.array(obj)
            return None if word is None else self._word(obj, word)
        if (
            isinstance(obj, type)
            and obj is not self._copied
            and _class_reducer(obj) is None
            and _serialization._stays(obj)
        ):
            class_id = id_of_class(obj)
            with _lock:  # who finds a class known may send it at once
                if class_id not in self._peer.classes:
                    self._peer.classes.add(class_id)  # before it is pickled: it may refer to itself
                    try:
                        self._peer.define_class(class_id, obj)
                    except BaseException:
                        self._peer.classes.discard(class_id)
                        raise
            self.held.append(obj)
            return class_id
        return None

    def _word(self, obj: Any, word: Any) -> int:
        number = self._numbers[id(obj)] = len(self.words)
        self.words.append(word)
        self.held.append(obj)
        return number

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if (reduce := _reducers.get(kind)) is not None:
            return reduce(obj)
        if kind is Parcel:
            self.parcels.append(obj)
            return obj.reduce()
        if kind is Packed:
            return first_array, (obj.parcel,)
        if kind is np.ndarray and (parcel := array_parcel(obj)) is not None:
            return only_array, (parcel,)
        if kind is _compat.ArrayImpl:
            return _local_array, (_data_of(obj),)
        if kind is jax.custom_jvp or kind is jax.custom_vjp:  # their own way does not unpickle
            return kind, (obj.fun,), dict(vars(obj))
        if isinstance(obj, jax.Array):  # a typed key
            return _wrap_key, (_compat.key_data(obj), _compat.key_impl(obj.dtype))
        if isinstance(obj, type) and (reduce := _class_reducer(obj)) is not None:
            return reduce(obj)
        reduced = super().reducer_override(obj)
        if self._copied is not None and obj is self._copied and isinstance(reduced, tuple):
            skeleton, arguments, *rest = reduced
            return _make_class, (id_of_class(self._copied), skeleton, *arguments), *rest
        return reduced


def _data_of(array: Any) -> Any:
    if not array.is_fully_addressable:
        raise TypeError(
            "an array of devices of other hosts was not made by the library: computing with handles "
            "gives nothing. Use what colocated calls and device_put return"
        )
    if len(array.sharding.device_set) > 1:
        raise TypeError(
            "arrays over several devices of this process are not copied to hosts: use "
            "'await device_put(x, sharding)' and pass the result as an argument"
        )
    return np.asarray(array)


def _local_array(data: Any) -> Any:
    return jax.device_put(data, jax.local_devices()[0])


def _wrap_key(data: Any, impl: str) -> Any:
    return jax.random.wrap_key_data(data, impl=impl)


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        data: bytes,
        things: Sequence[Any],
        find_class_by_id: Callable[[str], type],
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._things = things
        self._find_class_by_id = find_class_by_id

    def persistent_load(self, pid: Any) -> Any:
        return self._things[pid] if type(pid) is int else self._find_class_by_id(pid)


def dumps(obj: Any, peer: Peer, copied: type | None = None) -> Pickled:
    """Pickle a value for the other side.

    Raises:
        Exception: it holds something that is not shipped.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, peer, copied)
    pickler.dump(obj)
    return Pickled(file.getvalue(), tuple(pickler.words), pickler.parcels, pickler.held)


class _Definition:
    """A class with how it was registered as a pytree; loading it gives the class."""

    def __init__(self, cls: type, registration: tuple[Any, Any]) -> None:
        self._cls = cls
        self._registration = registration

    def __reduce__(self) -> Any:
        return _define, (self._cls, *self._registration)


def _define(cls: type, register: Callable[..., Any], arguments: tuple[Any, ...]) -> type:
    with contextlib.suppress(ValueError):  # it is registered already
        register(*arguments)
    return cls


def dumps_class(cls: type, peer: Peer) -> Pickled:
    """Pickle a class that the other side cannot import."""
    registration = _compat.pytree_registration(cls)
    return dumps(cls if registration is None else _Definition(cls, registration), peer, cls)


class Plain:
    """A value of the library's own: plain Python values and parcels, which it takes no time to pickle."""

    __slots__ = ("parcels", "value")

    def __init__(self, value: Any, parcels: list[Parcel]) -> None:
        self.value = value
        self.parcels = parcels

    def pickled(self) -> Pickled:
        return Pickled(pickle.dumps(self.value, 5), (), self.parcels, [])


class Fixed:
    """Something that is sent time and again, such as a sharding: pickled and unpickled once."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        data = _fixed_data.get(self.value)
        if data is None:
            if len(_fixed_data) >= _MOST_FIXED:
                _fixed_data.clear()
            data = _fixed_data[self.value] = dumps(self.value, Peer()).data
        return _find_fixed, (data,)


_MOST_FIXED = 1024
_fixed_data: dict[Any, bytes] = {}
_fixed: dict[bytes, Any] = {}


def forget_fixed() -> None:
    """Let go of what was sent: it may be of hosts that are closed."""
    _fixed_data.clear()


def _find_fixed(data: bytes) -> Any:
    if data not in _fixed:
        if len(_fixed) >= _MOST_FIXED:
            _fixed.clear()
        _fixed[data] = loads(data, (), _local_class)
    return _fixed[data]


def loads(data: bytes, things: Sequence[Any], find_class_by_id: Callable[[str], type]) -> Any:
    """Undo :func:`dumps`. Unpickling runs code: it trusts the sender."""
    return _Unpickler(data, things, find_class_by_id).load()


# --- exceptions ------------------------------------------------------------------------------------------


class RemoteTraceback(Exception):
    """The cause of an exception from another host: its traceback there, as text."""

    def __init__(self, host: str, text: str) -> None:
        super().__init__(host, text)
        self.host = host
        self.text = text

    def __str__(self) -> str:
        return f'\n"""on {self.host}\n{self.text}"""'


class _ByValue(Peer):
    """Sends arrays as values: nobody keeps those of an exception on their host."""

    def __init__(self, peer: Peer) -> None:
        self.classes = peer.classes
        self._peer = peer

    def array(self, array: Any) -> Any:
        return None

    def define_class(self, class_id: str, cls: type) -> None:
        self._peer.define_class(class_id, cls)


def dump_error(error: BaseException, peer: Peer) -> tuple[bytes, str, str, str]:
    """An exception for the other side: itself, if it survives that, and its type, text and traceback."""
    notes = [n for n in getattr(error, "__notes__", ()) if not n.startswith("colocated call ")]
    with contextlib.suppress(Exception):
        error.__notes__ = list(notes)  # the controller has a note of its own
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be made)"
    data = b""
    with contextlib.suppress(Exception):
        pickled = dumps((error, notes), _ByValue(peer))
        if not pickled.words and not pickled.parcels:
            loads(pickled.data, (), _local_class)
            data = pickled.data
    return data, kind, text, "".join(lines)


def _local_class(class_id: str) -> type:
    found = known_class(class_id)
    if found is None:
        raise HostError(f"class {class_id} is not known here")
    return found


def load_error(
    parts: tuple[bytes, str, str, str],
    host: str,
    find_class_by_id: Callable[[str], type] = _local_class,
) -> BaseException:
    """Undo :func:`dump_error`; a :exc:`RemoteError` in place of what cannot be unpickled here."""
    data, kind, text, lines = parts
    error: BaseException | None = None
    if data:
        with contextlib.suppress(Exception):
            loaded, notes = loads(data, (), find_class_by_id)
            if isinstance(loaded, BaseException):
                error = loaded
                for note in notes or ():
                    if note not in getattr(error, "__notes__", ()):
                        error.add_note(note)
    if error is None:
        return RemoteError(kind, text, lines)
    with contextlib.suppress(Exception):
        error.__cause__ = RemoteTraceback(host, lines)
    return error


def describe_failure(
    error: Exception, where: str, value: Any, name_path: Callable[[Any], str], peer: Peer
) -> ArgumentError:
    """Arguments or a result cannot go to another host: which leaf of them, and why."""
    way = "values are pickled for other hosts"
    for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
        try:
            dumps(leaf, peer)
        except Exception as reason:
            return ArgumentError(
                f"{where}: {name_path(path)} is a {type(leaf).__qualname__}: {reason}; {way}"
            )
    return ArgumentError(f"{where}: {error}; {way}")
