"""Builds a communicator from ranks that share a store of torch.

Rank 0 writes the rendezvous and offers it to each other rank, by a key of that rank's own. Who takes an offer removes its
key, and rank 0 removes the rendezvous once all have joined. So no key stays, and groups that follow one another over one
store never see each other's.

The store is read by calls that give numbers alone: torch 1.13 makes the bytes of ``get`` and ``compare_set`` without holding
the interpreter's lock, which corrupts the heap as soon as another thread runs Python beside it.
"""

import os
import socket
import time

from .. import Comm, Server
from ..errors import BootstrapError, Error, PeerLost, Timeout

# Seconds between two polls of the store: first and longest.
_FIRST, _LONGEST = 0.0005, 0.02
# Seconds in which another rank's end, seen at a broken store, becomes known by its name.
_NAMED = 2.0
# Half of the library's default. torch's calls run beside the model's kernels, and a call occupies its SMs even while it
# waits for another rank. Large calls alone take 4 % longer (docs/benchmarks/2026-11-22-torch-gpu.md).
_CUDA_BLOCKS = 64
# Bytes in one number of a store, which has 64 bits and a sign.
_BYTES = 7


def cuda_blocks():
    """Blocks of a GPU for a group's calls, where the environment does not say so."""
    return None if "TINYNCCL_CUDA_BLOCKS" in os.environ else _CUDA_BLOCKS


def own_address():
    """The address of this host on the way to MASTER_ADDR, by which the other ranks reach it as well."""
    try:
        master = socket.getaddrinfo(os.environ.get("MASTER_ADDR", "localhost"), 1, type=socket.SOCK_DGRAM)
        family, _, _, _, address = master[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Sends nothing.
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError:
        return socket.gethostname()


def watch_world(world, members):
    """A watch over ranks of the world's group, ``members`` or all: raises once one of them is gone."""

    def watch():
        if world is None or world._closed:
            return
        try:
            world._comm.check()
        except PeerLost as error:
            if not members or error.peer in members:
                raise
        except Error:
            # Its failure is not of a rank's end.
            pass
        for rank in members or range(world.size()):
            if world._comm.has_left(rank):
                raise PeerLost(f"a new group: rank {world._rank} lost rank {rank}: it closed its communicator and left")

    return watch


def _nobody():
    """Of a group that watches no other: nothing ends its waits early."""


class Meeting:
    """Where ranks meet: keys of ``what`` in a store. ``watch`` is called repeatedly by every wait, which it may end by an
    exception."""

    def __init__(self, store, what, timeout, watch=_nobody):
        self._store, self._prefix = store, f"tinynccl-{what}"
        self._timeout, self._watch = timeout, watch
        # Numbers that were seen and not taken yet.
        self._seen = {}

    def is_offered(self, rank):
        """Whether rank 0 has come. Returns at once: ``get`` would wait, and a ``TCPStore`` that waits for one thread blocks all
        others, even the one whose ``set`` would end a wait elsewhere."""
        return self._look(f"offer-{rank}") is not None

    def join(self, rank, size, late, names=None):
        """A communicator of ``size`` ranks. If rank 0 does not arrive, the error begins with ``late``. Errors call the ranks by
        ``names``. A function gives this rank's name alone; rank 0 then collects them. Names are whole numbers."""
        server = None
        exchange = callable(names)
        names = [names()] if exchange else names
        if exchange and rank:
            self._give(f"name-{rank}", names[0] + 1)
        elif exchange:
            names += [self._take(f"name-{other}", late) - 1 for other in range(1, size)]
        if rank == 0:
            server = Server(size)
            numbers = _pack(server.unique_id)
            count = len(numbers)
            numbers += [name + 1 for name in names] if exchange else []
            written = {f"rendezvous-{i}": number for i, number in enumerate(numbers)} if size > 1 else {}
            for key, number in written.items():
                self._do("set", key, str(number))
            for other in range(1, size):
                self._give(f"offer-{other}", count)
        else:
            count = self._take(f"offer-{rank}", late)
            numbers = [self._do("add", f"rendezvous-{i}", 0) for i in range(count + (size if exchange else 0))]
            if 0 in numbers:
                raise BootstrapError(f"rank {rank} of {size}: rank 0 could not begin the group, and took its offer back")
            names = [number - 1 for number in numbers[count:]] or names
        try:
            return Comm(
                server.unique_id if rank == 0 else _unpack(numbers[:count]),
                rank,
                size,
                timeout=self._timeout,
                server=server,
                cuda_blocks=cuda_blocks(),
                ranks=names,
                watch=self._watch,
            ), names
        except BaseException:
            for other in range(1, size if rank == 0 else 0):
                self._remove(f"offer-{other}-there", f"offer-{other}")
            raise
        finally:
            if rank == 0:
                self._remove(*written)

    def _remove(self, *keys):
        try:
            for key in keys:
                self._store.delete_key(f"{self._prefix}-{key}")
        except RuntimeError:
            # The store is gone, and the keys with it.
            pass

    def _give(self, key, number):
        """Leaves a positive number for the one rank that takes it."""
        self._do("set", key, str(number))
        self._do("set", f"{key}-there", "1")

    def _take(self, key, late):
        """The number that another rank gives, which is then gone."""
        end, pauses = time.monotonic() + self._timeout, Pauses()
        while (number := self._look(key)) is None:
            self._watch()
            if time.monotonic() > end:
                raise Timeout(f"{late}: nothing came for {self._timeout} s")
            pauses.sleep()
        del self._seen[key]
        self._do("delete_key", key)
        return number

    def _look(self, key):
        """The number under ``key``, or None. Leaves no key where there is none, unlike ``add`` alone."""
        # A FileStore removes what is not there, too; then the number is 0.
        if key not in self._seen and self._do("delete_key", f"{key}-there") and (number := self._do("add", key, 0)):
            self._seen[key] = number
        return self._seen.get(key)

    def _do(self, method, key, *arguments):
        try:
            return getattr(self._store, method)(f"{self._prefix}-{key}", *arguments)
        except RuntimeError as error:
            # Most likely its host has ended, whose rank the watch can name soon.
            end = time.monotonic() + _NAMED
            while time.monotonic() < end:
                self._watch()
                time.sleep(_LONGEST)
            raise BootstrapError(
                f"{method} of {self._prefix}-{key}: torch's store does not answer ({str(error).splitlines()[0]}): has the process "
                "that hosts it ended? With init_method env:// or tcp:// it is that of rank 0"
            ) from error


def _pack(text):
    """A text without NUL as positive numbers, which all stores can ``add`` to."""
    data = text.encode()
    return [int.from_bytes(data[at : at + _BYTES], "big") for at in range(0, len(data), _BYTES)]


def _unpack(numbers):
    return b"".join(number.to_bytes((number.bit_length() + 7) // 8, "big") for number in numbers).decode()


class Pauses:
    """Sleeps with an exponential backoff."""

    def __init__(self, longest=_LONGEST):
        self._next, self._longest = _FIRST, longest

    def sleep(self):
        time.sleep(self._next)
        self._next = min(2 * self._next, self._longest)
