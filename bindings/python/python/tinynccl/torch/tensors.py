"""Operators and tensors as the communicator takes them."""

import torch
import torch.distributed as dist

from .. import InvalidArgument

_NAMES = {"SUM": "sum", "AVG": "avg", "MIN": "min", "MAX": "max", "PRODUCT": "prod"}
# By hash, which is torch's number of the operator: comparing two of them takes a microsecond.
_OPERATORS = {hash(getattr(dist.ReduceOp, name)): ours for name, ours in _NAMES.items() if hasattr(dist.ReduceOp, name)}


def operator(opts, rank, call):
    """The operator of an opts object, or given by itself."""
    # Each reading makes an object anew, which takes longer than all else here.
    op = getattr(opts, "reduceOp", opts)
    name = "sum" if op is None else _OPERATORS.get(hash(op))
    if name is None:
        raise InvalidArgument(f"{call}: rank {rank}: operator {op}, expected SUM, AVG, MIN, MAX or PRODUCT")
    return name


def as_list(tensors):
    if type(tensors) is list:
        return tensors
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def real(tensor):
    """Complex numbers as pairs of real ones: sums of them are sums of both."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def spread(flat, parts):
    """Parts of a flat tensor to where they belong."""
    at = 0
    for part in parts:
        part.copy_(flat[at : at + part.numel()].view(part.shape))
        at += part.numel()
