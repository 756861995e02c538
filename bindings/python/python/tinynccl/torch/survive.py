"""The default process group goes on without ranks that are lost, and with processes that come later.

The new group takes the place of the old one: ``torch.distributed`` is initialized anew, with ranks numbered from 0. Modules that
keep the old group, such as ``DistributedDataParallel``, and groups of some of the ranks are made again.
"""

import datetime

import torch
import torch.distributed as dist

from .. import Comm, Error, InvalidArgument
from . import group
from .meet import cuda_blocks, own_address
from .work import seconds

# Longest text of the address of a store.
_TEXT = 256


def shrink():
    """Makes the default group one of the ranks that live, in their order. Every rank that lives calls it, after an error of a
    call; it ends the calls of ranks that have not noticed one."""
    _change(lambda comm: comm.shrink(), revoke=True)


def grow(size):
    """As :func:`shrink`, and takes in processes that wait in :func:`join`, up to ``size`` ranks in all. Also called without a
    failure, by all ranks, where the sum of :func:`waiting` over them is not 0."""
    _change(lambda comm: comm.grow(size), revoke=False)


def ticket():
    """A text with which processes join the default group later (:func:`join`); it holds a secret."""
    return _world("ticket").comm.ticket()


def waiting():
    """Processes that wait at this rank to be taken in; a sum over all ranks counts them."""
    return _world("waiting").comm.waiting


def join(ticket, timeout=None):
    """Joins the default group of the ranks that made ``ticket``, in place of ``init_process_group``; returns once they take this
    process in (:func:`grow`). ``timeout`` is that of the group's calls, in seconds or as a ``timedelta``."""
    if dist.is_initialized():
        raise InvalidArgument("join: this process has a default group already")
    _begin(Comm.from_ticket(ticket, timeout=seconds(timeout), cuda_blocks=cuda_blocks()))


def _change(change, revoke):
    world = _world("shrink" if revoke else "grow")
    comm, timeout = world.comm, world._timeout
    if revoke or _has_failed(comm):
        comm.revoke()
    _begin(change(comm), timeout)


def _begin(comm, timeout=None):
    """Makes the ranks of ``comm`` the default group, once all of them have reached the same store."""
    while True:
        store, error = None, None
        try:
            store = _store(comm)
        except RuntimeError as why:  # of the communicator, or of a store whose host has died
            error = why
        ready, alive = comm.agree(int(store is not None))
        if ready and len(alive) == comm.size:
            break
        if len(alive) == comm.size:
            raise error or RuntimeError("shrink: another rank could not reach the new store, see its output")
        comm.revoke()
        comm = comm.shrink()
    if dist.is_initialized():
        dist.destroy_process_group()
    group.joined = comm
    try:
        limit = datetime.timedelta(seconds=seconds(timeout) or comm.timeout)
        dist.init_process_group("tinynccl", store=store, rank=comm.rank, world_size=comm.size, timeout=limit)
    finally:
        group.joined = None


def _store(comm):
    """A store at rank 0, which the ranks of ``comm`` have reached."""
    text = torch.zeros(_TEXT, dtype=torch.uint8)
    limit = datetime.timedelta(seconds=comm.timeout)
    store = None
    if comm.rank == 0:
        store = dist.TCPStore(own_address(), 0, is_master=True, timeout=limit, wait_for_workers=False)
        address = f"{own_address()} {store.port}".encode()
        text[: len(address)] = torch.tensor(list(address), dtype=torch.uint8)
    comm.broadcast(text, 0)
    if store is None:
        host, port = bytes(text.tolist()).rstrip(b"\0").decode().split()
        store = dist.TCPStore(host, int(port), is_master=False, timeout=limit, wait_for_workers=False)
    return store


def _world(call):
    world = dist.distributed_c10d._get_default_group() if dist.is_initialized() else None
    if not isinstance(world, group.Group):
        raise InvalidArgument(f'{call}: there is no default group of tinynccl: init_process_group("tinynccl") makes it')
    return world


def _has_failed(comm):
    try:
        comm.check()
    except Error:
        return True
    return False
