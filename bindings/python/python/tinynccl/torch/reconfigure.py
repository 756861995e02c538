"""torch 2.15's contract for fault tolerance: a group becomes one of the processes whose handles it is given, in the caller's order.

A handle is the address of a store that its process hosts. The ranks of a new group meet at the store of the new rank 0, so no
rank that is lost and no older store is needed. One key there, which the first rank that knows it writes, says how an attempt
ended; so it ends alike on all ranks. Until then the group is what it was.
"""

import datetime
import hashlib
import json
import math
import secrets
import socket
import time

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from .. import errors
from ..errors import BootstrapError, Error, InvalidArgument, PeerLost, Timeout
from .meet import Meeting, Pauses, own_address
from .messages import Message
from .tensors import Plain
from .work import Work, seconds

_PREFIX = "tinynccl"
_CALL = "_reconfigure"
# Seconds between two looks whether the other processes are there, and the longest look at one of them.
_LOOK, _GLANCE = 1.0, 0.2
# Longest attempt to reach a store, longer than a look-up in the DNS that is not answered, in seconds.
_DIAL = 6.0
# Longest pause between two looks at the attempt's keys, in seconds.
_PAUSE = 0.002


class Unmade:
    """The communicator of a group that waits for its first ``_reconfigure``."""

    closed = True

    def __init__(self, rank):
        self._rank = rank

    def abort(self, reason=None):
        """Nothing is in flight."""

    close = abort

    def __getattr__(self, name):
        raise InvalidArgument(
            f"{name}: rank {self._rank}: the group has no communicator yet: with enable_reconfigure=True "
            "torch.distributed._reconfigure makes the first one"
        )


class Reconfigurable:
    """The methods by which torch reconfigures a group."""

    _listener = None

    @property
    def supports_reconfigure(self):
        return True

    def get_reconfigure_handle(self):
        """A text by which other processes reach this group's place in this process, the same as long as the group lives."""
        return self._own().handle

    def reconfigure(self, opts):
        """Makes the group one of the processes of ``opts.handles``, ranks in their order (of a set: sorted); every one of them calls
        it with the same ``uuid``. Returns a complete work. If it fails, all of them raise the same error and have the group that
        they had; they may repeat it with a new ``uuid`` and the same handles."""
        handles = sorted(opts.handles) if isinstance(opts.handles, (set, frozenset)) else list(opts.handles)
        places, own = [_parse(self._me, handle) for handle in handles], self._own()
        if len(set(handles)) != len(handles) or own.handle not in handles:
            why = "a handle is there twice" if own.handle in handles else "this process's own is missing"
            raise InvalidArgument(f"{_CALL}: rank {self._me}: of {len(handles)} handles {why}: each process gives one, that it has now")
        limit = self._timeout if opts.timeout is None else seconds(opts.timeout)
        attempt = Attempt(own, opts.uuid, places, handles.index(own.handle), limit)
        comm, store = attempt.run(self._timeout)
        self._renew(comm, store, attempt.groups)
        return Work.of(None, [], self._kept)

    def get_error(self):
        """The kind of failure that ended the group's calls; an ``abort`` of the caller's own is none."""
        try:
            self._comm.check()
        except Timeout:
            return c10d.ErrorType.TIMEOUT
        except PeerLost:
            return c10d.ErrorType.REMOTE_ERROR
        except (errors.Aborted, InvalidArgument):
            return c10d.ErrorType.SUCCESS
        except Error:
            return c10d.ErrorType.COMM_ERROR
        return c10d.ErrorType.SUCCESS

    def _own(self):
        with self._lock:
            if self._listener is None:
                self._listener = Listener(self._timeout)
            return self._listener

    def _renew(self, comm, store, groups):
        """Takes the new communicator; what is in flight on the old one ends."""
        reason = "the group was reconfigured"
        with self._lock:
            old, self._comm, self._store = self._comm, comm, store
            channels, self._channels = list(self._channels.values()), {}
            deferred, self._deferred = self._deferred, []
            self._rank, self._size, self._names = comm.rank, comm.size, None
            self._me, self._number, self._coalesced = comm.rank, 0, None
        for work in deferred:
            ended = Message(Plain([], [work.memory]), work.memory, 0)
            ended.complete(errors.Aborted(f"send/recv: rank {self._me}: {reason}"))
            work._call = ended
        for channel in channels:
            channel.abort(reason)
            channel.close()
        old.abort(reason)
        old.close()
        world = dist.distributed_c10d._world
        if self is world.default_pg:
            # Groups of some of the ranks are made over this store, and under names that all ranks count alike.
            world.pg_map[self] = (world.pg_map[self][0], store)
            world.pg_group_ranks[self] = {rank: rank for rank in range(comm.size)}
            world.group_count = groups


if not hasattr(c10d, "ReconfigureOptions"):

    class Reconfigurable:
        """Of torch before 2.15, which has no such contract."""


class Listener:
    """The store of this process at which a group that it leads meets."""

    def __init__(self, timeout):
        address = own_address()
        limit = datetime.timedelta(seconds=timeout)
        self.store = dist.TCPStore(address, 0, is_master=True, timeout=limit, wait_for_workers=False)
        nonce = secrets.token_hex(8)
        # Another process may get the port later.
        self.store.set(nonce, "1")
        self.handle = f"{_PREFIX};{address};{self.store.port};{nonce}"
        self.used = set()
        # Of other processes, by place. Both ends of a new connection look its addresses up in the DNS, which may take seconds.
        self.reached = {}


def _parse(me, handle):
    """Host, port and key of a handle."""
    kind, *place = handle.split(";")
    if kind != _PREFIX or len(place) != 3 or not place[1].isdigit():
        raise InvalidArgument(f"{_CALL}: rank {me}: {handle!r} is no handle of tinynccl: _get_reconfigure_handle gives one")
    return place[0], int(place[1]), place[2]


class Attempt:
    """One attempt of the processes at ``places`` to become a group; this one is ``rank``."""

    # What torch counts groups by, the highest of all ranks.
    groups = 0

    def __init__(self, own, uuid, places, rank, limit):
        self._own, self._uuid, self._places, self._rank, self._limit = own, uuid, places, rank, limit
        self._end = time.monotonic() + limit
        self._looked = 0.0
        self._me = f"{_CALL} {uuid}: rank {rank} of {len(places)}"

    def run(self, timeout):
        """A communicator whose calls end after ``timeout``, and a store of its ranks."""
        store = self._reach()
        self._keys = dist.PrefixStore(f"attempt/{self._uuid}", store)
        if self._uuid in self._own.used:
            error = InvalidArgument(f"{self._me}: uuid {self._uuid} was already used: each call needs a new one")
            self._concede(error)
            raise error
        self._own.used.add(self._uuid)
        comm = None
        try:
            self._arrive()
            late = f"{self._me}: rank 0 has not begun"
            comm, _ = Meeting(self._keys, "group", timeout, self._watch).join(self._rank, len(self._places), late)
            if self._keys.add("made", 1) == len(self._places):
                self._decide(None)
            self._until(lambda: self._keys.check(["decision"]))
            failure = self._decide(None)
        except BaseException as error:
            failure = self._concede(error)
            if not isinstance(error, Exception):
                failure = error  # of a signal, also when the others have begun
        if failure is not None:
            if comm is not None:
                comm.abort(str(failure))
                comm.close()
            raise failure
        return comm, dist.PrefixStore(f"group/{self._uuid}", store)

    def _reach(self):
        """The store of the new rank 0."""
        if self._rank == 0:
            return self._own.store
        host, port, nonce = self._places[0]
        lost = PeerLost(f"{self._me} lost rank 0: its handle's {host}:{port} does not answer any more: has its process ended?")
        lost.op, lost.rank, lost.peer = _CALL, self._rank, 0
        store = self._own.reached.pop(self._places[0], None)
        while store is None:
            if _is_gone(host, port):
                raise lost
            try:
                # torch dials a port that refuses until the time is over, and its process may have ended since.
                store = dist.TCPStore(host, port, is_master=False, timeout=self._left(_DIAL), wait_for_workers=False)
            except RuntimeError as error:
                if time.monotonic() > self._end:
                    raise BootstrapError(f"{self._me}: cannot reach the store of rank 0 at {host}:{port}: {error}") from error
                time.sleep(_PAUSE)
        try:
            store.set_timeout(self._left())
            known = store.check([nonce])
        except RuntimeError:
            known = False
        if not known:
            raise lost
        self._own.reached[self._places[0]] = store
        return store

    def _left(self, longest=math.inf):
        """The time that is left, as torch takes it."""
        return datetime.timedelta(seconds=min(longest, max(0.1, self._end - time.monotonic())))

    def _arrive(self):
        """Waits for all ranks, which must have been given the same handles."""
        digest = hashlib.sha256(repr(self._places).encode()).hexdigest()
        if self._keys.compare_set("handles", "", digest).decode() != digest:
            raise errors.Mismatch(f"{self._me}: another rank was given other handles, or this uuid was already used")
        world = dist.distributed_c10d._world
        self._keys.set(f"here-{self._rank}", str(world.group_count))
        here = [f"here-{rank}" for rank in range(len(self._places))]
        self._until(lambda: self._keys.check(here))
        self.groups = max(int(count) for count in self._keys.multi_get(here))

    def _until(self, condition):
        pauses = Pauses(_PAUSE)
        while not condition():
            self._watch()
            pauses.sleep()

    def _watch(self):
        """Raises once the attempt has failed."""
        now = time.monotonic()
        if self._keys.check(["decision"]) and (failure := self._decide(None)) is not None:
            raise failure
        if now > self._end:
            missing = [rank for rank in range(len(self._places)) if not self._keys.check([f"here-{rank}"])]
            left = f"not arrived: ranks {', '.join(map(str, missing))}" if missing else "all ranks have come, but not all have a communicator"
            error = Timeout(f"{self._me} waited {self._limit} s: {left}")
            error.missing = tuple(missing)
            raise error
        if self._rank == 0 and now - self._looked > _LOOK:
            self._looked = now
            for rank, (host, port, _) in enumerate(self._places[1:], 1):
                if _is_gone(host, port):
                    error = PeerLost(f"{self._me} lost rank {rank}: nothing listens at its handle's {host}:{port} any more")
                    error.op, error.rank, error.peer = _CALL, 0, rank
                    raise error

    def _decide(self, failure):
        """Says how the attempt ended (None: with a group), unless that was said before; returns what was said first."""
        mine = "" if failure is None else json.dumps([type(failure).__name__, str(failure), failure.peer, failure.missing])
        said = self._keys.compare_set("decision", "", f"={mine}").decode()[1:]
        if not said or said == mine:
            return failure if said else None
        kind, text, peer, missing = json.loads(said)
        known = getattr(errors, kind, Error)(text)
        known.op, known.rank, known.peer, known.missing = _CALL, self._rank, peer, tuple(missing)
        return known

    def _concede(self, error):
        """Ends the attempt on all ranks with ``error``, unless it has ended; returns what was said first."""
        told = error if isinstance(error, Error) else Error(f"{self._me}: {error or type(error).__name__}")
        try:
            return self._decide(told)
        except RuntimeError:
            lost = PeerLost(f"{self._me} lost rank 0: the store of its handle does not answer any more")
            lost.op, lost.rank, lost.peer = _CALL, self._rank, 0
            return lost


def _is_gone(host, port):
    """Whether no process listens there; a host that is silent proves nothing."""
    try:
        socket.create_connection((host, port), timeout=_GLANCE).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False
