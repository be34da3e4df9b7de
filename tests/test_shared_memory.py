# SPDX-License-Identifier: Apache-2.0
"""Memory shared between processes: what arrives, how long it stays, and that none is left behind."""

from __future__ import annotations

import errno
import gc
import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aiocolocated.hosts import _shared
from aiocolocated.hosts._shared import attach, share

pytestmark = pytest.mark.skipif(not _shared.AVAILABLE, reason="no shared memory on this system")

ROOT = Path(__file__).parent.parent
MIB = 1 << 20

# Runs what it is sent, one piece of source after the other, and answers with `answer`.
PEER = """
import gc, json, os, sys
import numpy as np
from aiocolocated.hosts import _shared
from aiocolocated.hosts._shared import attach, share
def fds(): return len(os.listdir("/proc/self/fd"))
def mappings(): return sum("/memfd:aiocolocated" in line for line in open("/proc/self/maps"))
names = globals()
for line in sys.stdin:
    names["answer"] = None
    try:
        exec(json.loads(line), names)
    except Exception as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    print(json.dumps(answer), flush=True)
"""


class Peer:
    """Another process, which does as it is told."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PEER],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, source: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(textwrap.dedent(source)) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def share(self, source: str) -> _shared.Token:
        """Have it share the array that an expression makes, as `segment`."""
        pid, fd, inode, nbytes = self.run(f"segment = share([{source}]); answer = segment.token")
        return (pid, fd, inode, nbytes)

    def kill(self) -> None:
        self.process.kill()
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start_peer() -> Iterator[Callable[[], Peer]]:
    peers: list[Peer] = []

    def start() -> Peer:
        peers.append(Peer())
        return peers[-1]

    yield start
    for peer in peers:
        peer.end()


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    """One that no test ends."""
    peer = Peer()
    yield peer
    peer.end()


def fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    with open("/proc/self/maps") as file:
        return sum("/memfd:aiocolocated" in line for line in file)


def holders(token: _shared.Token) -> set[int]:
    """The processes that map the token's memory or have a descriptor of it: without any it is free."""
    found: set[int] = set()
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        try:
            with open(f"/proc/{pid}/maps") as file:
                if any("/memfd:" in line and int(line.split()[4]) == token[2] for line in file):
                    found.add(pid)
            for fd in os.listdir(f"/proc/{pid}/fd"):
                status = os.stat(f"/proc/{pid}/fd/{fd}")
                if status.st_ino == token[2] and not status.st_nlink:
                    found.add(pid)
        except OSError:  # it has ended, or is another user's
            pass
    return found


def eventually(condition: Callable[[], bool]) -> bool:
    """XLA's threads let go of memory a moment after a program has ended, and JAX with the next collection."""
    deadline = time.monotonic() + 10
    while True:
        gc.collect()
        if condition():
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Every test leaves as many descriptors and mappings as it found."""
    _shared.pool.clear()
    gc.collect()
    before = fds(), mappings()
    limit = _shared.pool.limit
    yield
    _shared.pool.limit = limit
    _shared.pool.clear()
    assert eventually(lambda: (fds(), mappings()) == before), (fds(), mappings(), before)


# --- what arrives -------------------------------------------------------------------------------------


def test_another_process_sees_the_bytes(peer: Peer) -> None:
    segment = share([np.arange(1000, dtype=np.int32), np.full((3, 5), 2.5)])
    assert segment.offsets == (0, 4032)
    assert segment.nbytes == 4032 + 3 * 5 * 8
    answer = peer.run(f"""
        view = attach({segment.token})
        first = np.frombuffer(view, np.int32, 1000)
        second = np.frombuffer(view, float, 15, 4032)
        answer = [int(first.sum()), float(second.sum()), first.ctypes.data % 64, first.flags.writeable]
        del view, first, second
    """)
    assert answer == [499500, 37.5, 0, False]
    segment.close()


def test_a_child_is_the_sender(peer: Peer) -> None:
    view = attach(peer.share("np.arange(100.0)"))
    assert np.frombuffer(view).sum() == 4950
    peer.run("segment.close()")
    assert np.frombuffer(view).sum() == 4950  # who has attached it keeps it


ARRAYS = {
    "contiguous": np.arange(24.0).reshape(4, 6),
    "Fortran order": np.asfortranarray(np.arange(24.0).reshape(4, 6)),
    "transposed": np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1),
    "every third": np.arange(100, dtype=np.int16)[::3],
    "backwards": np.arange(100, dtype=np.int16)[::-1],
    "broadcast": np.broadcast_to(np.float32(3), (5, 7)),
    "read-only": np.frombuffer(b"abcdefgh", np.uint8),
    "scalar": np.array(7, np.int64),
    "big-endian": np.arange(5, dtype=">i4"),
    "bfloat16": np.arange(6, dtype=jnp.bfloat16).reshape(2, 3)[:, ::2],
    "bool": np.array([True, False]),
    "structured": np.array([(1, 2.0), (3, 4.0)], [("a", "i1"), ("b", "f8")]),
    "dates": np.array(["2020-01-01", "2021-02-03"], "datetime64[D]"),
    "text": np.array(["ab", "cde"])[::-1],
    "empty": np.empty((0, 3)),
    "no bytes": np.empty(3, "V0"),
    "matrix": np.ones((2, 3)).view(np.matrix),  # its rows cannot be made one-dimensional
}


@pytest.mark.parametrize("again", [False, True], ids=["new", "reused"])
@pytest.mark.parametrize("array", list(ARRAYS.values()), ids=list(ARRAYS))
def test_any_array(array: np.ndarray[Any, Any], again: bool) -> None:
    """Elements come in C order, whatever the strides, in new memory and in used one."""
    before, after = np.array([1], np.int8), np.array([2], np.int8)
    if again:
        share([b"\xff" * 4000]).recycle()
    segment = share([before, array, after])
    view = attach(segment.token)
    offset = segment.offsets[1]
    assert bytes(view[offset : offset + array.nbytes]) == array.tobytes()
    assert (view[0], view[segment.offsets[2]]) == (1, 2)
    segment.close()


@pytest.mark.parametrize(
    "buffer", [b"hello", bytearray(b"hello"), memoryview(b"h.e.l.l.o")[::2], memoryview(b"hello")]
)
def test_any_buffer(buffer: Any) -> None:
    segment = share([buffer])
    assert bytes(attach(segment.token)) == b"hello"
    segment.close()


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("buffers", [[], [b""], [np.empty((0, 5)), b""]])
def test_nothing_to_share(peer: Peer, buffers: list[Any], private: bool) -> None:
    """Zero bytes make a segment like any other."""
    segment = share(buffers)
    assert segment.nbytes == 0
    assert len(segment.buffer) == 0
    view = attach(segment.token, private=private)
    assert len(view) == 0
    assert np.asarray(view).flags.writeable is private
    assert peer.run(f"answer = len(attach({segment.token}))") == 0
    segment.recycle()
    with pytest.raises(FileNotFoundError):
        attach((*segment.token[:1], 9999, *segment.token[2:]))


def test_pointers_are_refused() -> None:
    with pytest.raises(TypeError, match="object has no bytes"):
        share([np.ones(100), np.array([object()])])
    with pytest.raises(TypeError, match="StringDType"):
        share([np.array(["a"], np.dtypes.StringDType())])


def test_read_only_means_read_only() -> None:
    segment = share([np.arange(10)])
    array = np.frombuffer(attach(segment.token), int)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True
    segment.close()


def test_private_bytes_are_nobody_elses(peer: Peer) -> None:
    segment = share([np.zeros(3 * 4096, np.uint8)])
    other = attach(segment.token)
    array = np.frombuffer(attach(segment.token, private=True), np.uint8)
    array[5000] = 7
    assert other[5000] == segment.buffer[5000] == 0
    peer.run(f"np.frombuffer(attach({segment.token}, private=True), np.uint8)[5000] = 8")
    assert array[5000] == 7
    segment.close()
    assert array[5000] == 7


def test_the_sender_writes_to_its_buffer(peer: Peer) -> None:
    segment = _shared.Segment(100)
    buffer = segment.buffer
    buffer[:3] = b"abc"
    assert peer.run(f"answer = bytes(attach({segment.token})[:3]).decode()") == "abc"
    segment.close()
    with pytest.raises(ValueError, match="closed"):
        _ = segment.buffer
    buffer[0] = 0  # it still is memory


# --- how long it stays --------------------------------------------------------------------------------


def test_views_keep_it_mapped() -> None:
    segment = share([np.arange(1000)])
    before = mappings()
    array = np.frombuffer(attach(segment.token), int)[10:20]
    segment.close()
    assert mappings() == before + 1
    assert array[0] == 10
    del array
    assert mappings() == before


@pytest.mark.parametrize("private", [False, True], ids=["shared", "private"])
def test_jax_arrays_are_the_mapped_memory(private: bool) -> None:
    """``device_put`` makes no copy on CPU devices; the array keeps the memory, and lets go of it."""
    count = MIB // 4
    segment = share([np.arange(count, dtype=np.float32)])
    before = mappings()
    view = attach(segment.token, private=private)
    array = np.frombuffer(view, np.float32)
    address = array.ctypes.data
    x = jax.device_put(array, jax.devices()[1])
    segment.close()
    del view, array
    gc.collect()
    x.block_until_ready()
    assert x.unsafe_buffer_pointer() == address
    assert mappings() == before + 1
    assert float(jnp.max(x)) == count - 1
    y = x + 1
    y.block_until_ready()
    del x
    assert eventually(lambda: mappings() == before)
    assert float(y[-1]) == count


def test_jax_arrays_of_several_buffers() -> None:
    """One segment, many arrays: the last one keeps it."""
    buffers = [np.full(n, n, np.float32) for n in (1, 100, 5000, 70000)]
    segment = share(buffers)
    before = mappings()
    view = attach(segment.token)
    flats = [
        np.frombuffer(view, np.float32, buffer.size, offset)
        for buffer, offset in zip(buffers, segment.offsets, strict=True)
    ]
    arrays = [jax.device_put(flat) for flat in flats]
    addresses = [flat.ctypes.data for flat in flats]
    assert [x.unsafe_buffer_pointer() for x in arrays] == addresses
    segment.close()
    del view, flats
    while arrays:
        x = arrays.pop(0)
        assert float(x[-1]) == x.size
        del x
        assert eventually(lambda: mappings() == before + bool(arrays))


def test_donated_memory_is_let_go() -> None:
    """A donated read-only array is either copied or refused, and never written to."""
    segment = share([np.zeros(MIB, np.float32)])
    before = mappings()
    x = jax.device_put(np.frombuffer(attach(segment.token), np.float32))
    y = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    y.block_until_ready()
    assert np.frombuffer(segment.buffer, np.float32).max() == 0
    del x
    assert eventually(lambda: mappings() == before + 1)  # that of the sender's own buffer
    assert float(y.max()) == 1
    segment.close()


def test_whoever_asks_unmaps() -> None:
    """``dropped`` gets the unmapping, once, and until it is called the memory stays mapped."""
    notes: list[Callable[[], Any]] = []
    segment = share([b"x" * 100])
    before = mappings()
    view = attach(segment.token, dropped=notes.append)
    other = view[10:]
    del view
    assert not notes
    del other
    assert len(notes) == 1
    assert mappings() == before + 1
    notes.pop()()
    assert mappings() == before
    segment.close()


def test_a_dropped_segment_is_closed() -> None:
    before = fds()
    segment = share([b"x"])
    token = segment.token
    assert fds() == before + 1
    del segment
    assert fds() == before
    with pytest.raises(FileNotFoundError, match="closed"):
        attach(token)


def test_closing_twice_is_fine() -> None:
    segment = share([b"x"])
    segment.close()
    segment.close()
    segment.recycle()
    assert segment.closed
    assert _shared.pool.nbytes == 0


# --- what cannot be attached --------------------------------------------------------------------------


@pytest.mark.parametrize("waited", [False, True], ids=["zombie", "waited for"])
def test_the_sender_is_gone(start_peer: Callable[[], Peer], waited: bool) -> None:
    peer = start_peer()
    token = peer.share("np.arange(100.0)")
    view = attach(token)
    peer.kill()
    if waited:
        peer.end()
    with pytest.raises(ProcessLookupError, match=rf"process {token[0]}: the process has ended"):
        attach(token)
    assert np.frombuffer(view).sum() == 4950  # attached before
    peer.end()


def test_a_closed_segment(peer: Peer) -> None:
    token = peer.share("np.ones(100)")
    peer.run("segment.close()")
    with pytest.raises(FileNotFoundError, match="it was closed"):
        attach(token)


@pytest.mark.parametrize("kind", ["file", "pipe", "socket", "segment"])
def test_the_descriptor_is_another_files(kind: str) -> None:
    """The number of a closed descriptor is given out again; that is noticed, and nothing waits."""
    segment = share([b"x" * 100])
    token = segment.token
    segment.close()
    fresh: list[int] = []
    if kind == "segment":
        other = share([b"y" * 100])
        assert other.token[1] == token[1]
    elif kind == "pipe":
        fresh.extend(os.pipe())
    elif kind == "socket":
        fresh.append(socket.socket().detach())
    else:
        fresh.append(os.open(os.devnull, os.O_RDONLY))
    assert kind == "segment" or token[1] in fresh
    with pytest.raises(FileNotFoundError, match="it was closed"):
        attach(token)
    for fd in fresh:
        os.close(fd)


def test_a_wrong_size() -> None:
    segment = share([b"x" * 100])
    pid, fd, inode, _ = segment.token
    with pytest.raises(ValueError, match=r"it has 4096 bytes, not 5000"):
        attach((pid, fd, inode, 5000))
    segment.close()


def test_no_room_to_map(start_peer: Callable[[], Peer]) -> None:
    """The error is the system's, and no descriptor is left."""
    segment = share([np.zeros(64 * MIB, np.uint8)])
    peer = start_peer()
    answer = peer.run(f"""
        import resource
        before = fds()
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), -1))
        try:
            attach({segment.token})
        except OSError as error:
            answer = [error.errno, str(error), fds() - before]
    """)
    assert answer[0] == errno.ENOMEM
    assert "cannot map 67108864 bytes" in answer[1]
    assert answer[2] == 0
    segment.close()


def test_an_error_while_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "no space")

    before = fds()
    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match="no space"):
        share([b"x" * 100])
    assert fds() == before


def test_short_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system writes 2 GiB at most in one go."""
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:1000], offset))
    array = np.arange(2000, dtype=np.int16)
    segment = share([b"x", array])
    assert bytes(attach(segment.token)[64:]) == array.tobytes()
    segment.close()


def test_no_descriptors(start_peer: Callable[[], Peer]) -> None:
    segment = share([b"x"])
    peer = start_peer()
    answer = peer.run(f"""
        import resource
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        answer = []
        for action in (lambda: share([b"x"]), lambda: attach({segment.token})):
            try:
                action()
            except OSError as error:
                answer.append(error.errno)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        answer.append(bytes(attach({segment.token})).decode())
    """)
    assert answer == [errno.EMFILE, errno.EMFILE, "x"]
    segment.close()


# --- nothing is left ----------------------------------------------------------------------------------


def test_killed_processes_leave_no_memory(start_peer: Callable[[], Peer]) -> None:
    """``kill -9`` of sender and receiver frees what they shared, mapped, and kept for reuse."""
    sender, receiver = start_peer(), start_peer()
    shared = sender.share("np.ones(1 << 20, np.uint8)")
    kept = sender.run("other = share([b'x']); answer = other.token; other.recycle()")
    assert receiver.run(f"view = attach({shared}); answer = int(np.asarray(view).sum())") == MIB
    assert holders(shared) == {sender.process.pid, receiver.process.pid}
    assert holders(kept) == {sender.process.pid}
    sender.end()
    assert holders(shared) == {receiver.process.pid}
    assert holders(kept) == set()
    assert receiver.run("answer = int(np.asarray(view).sum())") == MIB
    receiver.end()
    assert holders(shared) == set()


def test_many_rounds_leave_no_descriptor(peer: Peer) -> None:
    before, theirs = fds(), peer.run("gc.collect(); answer = [fds(), mappings()]")
    for round in range(300):
        segment = share([np.full(round * 100, 1.0), b"x"])
        assert attach(segment.token)[-1] == ord("x")
        if round % 30 == 0:
            peer.run(f"answer = attach({segment.token})[-1]")
        if round % 2:
            segment.close()
        else:
            segment.recycle()
    _shared.pool.clear()
    assert fds() == before
    assert peer.run("gc.collect(); answer = [fds(), mappings()]") == theirs


def test_attached_memory_holds_no_descriptor() -> None:
    segment = share([b"x" * 100])
    before = fds()
    views = [attach(segment.token) for _ in range(50)]
    assert fds() == before
    segment.close()
    assert fds() == before - 1
    assert {bytes(view[:1]) for view in views} == {b"x"}


# --- memory that is used again ------------------------------------------------------------------------


def test_recycled_memory_is_used_again() -> None:
    first = share([np.zeros(100_000, np.uint8)])
    inode = first.token[2]
    first.recycle()
    second = share([np.ones(97_000, np.uint8)])
    assert second.token[2] == inode
    assert second.nbytes == 97_000
    assert bytes(attach(second.token)) == b"\1" * 97_000
    third = share([np.ones(97_000, np.uint8)])  # while the second one is open
    assert third.token[2] != inode
    second.close()
    third.close()
    assert _shared.pool.nbytes == 0


def test_small_segments_do_not_take_large_files() -> None:
    share([np.zeros(MIB, np.uint8)]).recycle()
    segment = share([np.zeros(1000, np.uint8)])
    assert _shared.pool.nbytes == MIB
    segment.close()


def test_the_pool_keeps_to_its_limit() -> None:
    """The longest unused go first; what is larger than the limit is not kept at all."""
    _shared.pool.limit = 3 * MIB
    segments = [share([np.zeros(MIB, np.uint8)]) for _ in range(4)]
    inodes = [segment.token[2] for segment in segments]
    for segment in segments:
        segment.recycle()
    assert _shared.pool.nbytes == 3 * MIB
    share([np.zeros(4 * MIB, np.uint8)]).recycle()
    assert _shared.pool.nbytes == 3 * MIB
    again = [share([np.zeros(MIB, np.uint8)]) for _ in range(3)]
    assert [segment.token[2] for segment in again] == inodes[1:]
    for segment in again:
        segment.close()


def test_the_pool_keeps_few_descriptors() -> None:
    before = fds()
    segments = [share([b""]) for _ in range(100)]
    for segment in segments:
        segment.recycle()
    assert fds() == before + 64


def test_threads_share_one_pool() -> None:
    """Eight threads share, attach and recycle; no two ever write to the same memory."""
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        for round in range(60):
            array = np.full(20_000 + 100 * round, number * 100 + round, np.uint16)
            segment = share([array])
            view = attach(segment.token)
            assert np.array_equal(np.frombuffer(view, np.uint16), array)
            del view
            if round % 5:
                segment.recycle()
            else:
                segment.close()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))


def test_threads_close_one_segment() -> None:
    """A segment is closed or recycled once, whoever is first."""
    for _ in range(50):
        segment = share([b"x"])
        start = threading.Barrier(4)

        def close(number: int, segment: Any = segment, start: Any = start) -> None:
            start.wait()
            segment.recycle() if number % 2 else segment.close()

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(close, range(4)))
        assert len(_shared.pool._free) <= 1


def test_a_forked_child_has_a_pool_of_its_own(run_script: Callable[..., Any]) -> None:
    script = run_script("""
        import os
        from aiocolocated.hosts._shared import share

        first = share([b"parent"])
        token = first.token
        first.recycle()
        pid = os.fork()
        if pid == 0:
            segment = share([b"child!"])
            os._exit(0 if segment.token[2] != token[2] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert share([b"parent"]).token[2] == token[2]
    """)
    assert script.code == 0, script.stderr


def test_a_program_ends_with_all_of_it_open(run_script: Callable[..., Any]) -> None:
    script = run_script("""
        import jax, numpy as np
        from aiocolocated.hosts._shared import attach, share

        share([np.ones(1000)]).recycle()
        segment = share([np.ones(1_000_000, np.float32)])
        buffer = segment.buffer
        view = attach(segment.token, dropped=lambda unmap: unmap())
        x = jax.device_put(np.frombuffer(view, np.float32))
        cycle = [x, view, attach(segment.token, private=True)]
        cycle.append(cycle)
        print(float(x.sum()))
    """)
    assert script.check().stdout == "1000000.0\n"
    assert script.stderr == ""


def test_a_system_without_memory_files(run_script: Callable[..., Any]) -> None:
    run_script("""
        import os
        del os.memfd_create
        from aiocolocated.hosts import _shared

        assert _shared.AVAILABLE is False
        try:
            _shared.share([b"x"])
        except OSError as error:
            print(error)
    """).check()
