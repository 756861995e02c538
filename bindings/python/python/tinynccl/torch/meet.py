"""How ranks that share a store of torch become a communicator."""

from .. import Comm, Server


def meet(store, key, rank, size, timeout):
    """A communicator of ``size`` ranks that know the store."""
    server = None
    if rank == 0:
        server = Server(size)
        store.set(f"tinynccl-{key}", server.unique_id)
        unique_id = server.unique_id
    else:
        unique_id = store.get(f"tinynccl-{key}").decode()
    return Comm(unique_id, rank, size, timeout=timeout, server=server)
