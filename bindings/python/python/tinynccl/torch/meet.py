"""Builds a communicator from ranks that share a store of torch.

Rank 0 offers the rendezvous to each other rank, by a key of that rank's own. Who takes an offer removes its key. So no key
stays, and groups that follow one another over one store never see each other's: rank 0 offers the next rendezvous only when
all ranks have joined the one before.
"""

import json
import os
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
# No value of ours.
_NOTHING = "?"


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

    def is_offered(self, rank):
        """Whether rank 0 has come. Returns at once: ``get`` would wait, and a ``TCPStore`` that waits for one thread blocks all
        others, even the one whose ``set`` would end a wait elsewhere."""
        return self._look(f"offer-{rank}") is not None

    def join(self, rank, size, late, names=None):
        """A communicator of ``size`` ranks. If rank 0 does not arrive, the error begins with ``late``. Errors call the ranks by
        ``names``; with a function, by the names that the ranks have in its list: it is given the others' and returns ours."""
        server = None
        if callable(names):
            names = self._exchange_names(rank, size, names(), late) if size > 1 else [names()]
        if rank == 0:
            server = Server(size)
            offer = json.dumps({"id": server.unique_id, "names": names})
            for other in range(1, size):
                self._do("set", f"offer-{other}", offer)
        else:
            offer = json.loads(self._take(f"offer-{rank}", late))
            names = offer["names"] or names
        blocks = None if "TINYNCCL_CUDA_BLOCKS" in os.environ else _CUDA_BLOCKS
        try:
            return Comm(
                offer["id"] if rank else server.unique_id,
                rank,
                size,
                timeout=self._timeout,
                server=server,
                cuda_blocks=blocks,
                ranks=names,
                watch=self._watch,
            ), names
        except BaseException:
            if rank == 0:
                self._withdraw(size)
            raise

    def _exchange_names(self, rank, size, name, late):
        """The names of all ranks, at rank 0, which offers them to the others."""
        if rank:
            self._do("set", f"name-{rank}", str(name))
            return None
        return [name, *(int(self._take(f"name-{other}", late)) for other in range(1, size))]

    def _withdraw(self, size):
        """Takes back what nobody took."""
        try:
            for other in range(1, size):
                self._store.delete_key(f"{self._prefix}-offer-{other}")
        except RuntimeError:
            # The store is gone, and the offers with it.
            pass

    def _take(self, key, late):
        """The value of ``key`` once it is there, which it then no longer is."""
        end, pauses = time.monotonic() + self._timeout, Pauses()
        while (value := self._look(key)) is None:
            self._watch()
            if time.monotonic() > end:
                raise Timeout(f"{late}: nothing came for {self._timeout} s")
            pauses.sleep()
        self._do("delete_key", key)
        return value

    def _look(self, key):
        # All stores of all versions of torch answer so at once, and change nothing where the key is missing.
        value = self._do("compare_set", key, _NOTHING, _NOTHING).decode()
        return None if value == _NOTHING else value

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


class Pauses:
    """Sleeps with an exponential backoff."""

    def __init__(self):
        self._next = _FIRST

    def sleep(self):
        time.sleep(self._next)
        self._next = min(2 * self._next, _LONGEST)
