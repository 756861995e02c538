"""Operators and tensors as the communicator takes them."""

import torch
import torch.distributed as dist

from .. import InvalidArgument

# Each rank multiplies its values by a factor, then all are added: after `premultiply` only a sum remains.
PREMUL = "premul_sum"
_NAMES = {
    "SUM": "sum",
    "AVG": "avg",
    "MIN": "min",
    "MAX": "max",
    "PRODUCT": "prod",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
}
# torch 1.13 does not show the factor.
if torch.__version__ >= "2":
    _NAMES["PREMUL_SUM"] = PREMUL
# By hash, which is torch's number of the operator: comparing two of them takes a microsecond.
_OPERATORS = {hash(getattr(dist.ReduceOp, name)): ours for name, ours in _NAMES.items() if hasattr(dist.ReduceOp, name)}


# PREMUL has a refusal of its own, in `premultiply`.
_OF_COMPLEX = ("sum", "avg", PREMUL)


def operator(opts, rank, call, *tensors):
    """The operator of an opts object, or given by itself, for these tensors."""
    # Each reading makes an object anew, which takes longer than all else here.
    op = getattr(opts, "reduceOp", opts)
    name = "sum" if op is None else _OPERATORS.get(hash(op))
    if name is None:
        raise InvalidArgument(f"{call}: rank {rank}: operator {op}, expected one of {', '.join(_NAMES)}")
    if name not in _OF_COMPLEX:
        for tensor in tensors:
            if tensor.is_complex():
                raise InvalidArgument(f"{call}: rank {rank}: {name} of {tensor.dtype}, expected SUM or AVG")
    return name


def premultiply(opts, tensors, rank, call):
    """Multiplies the tensors by the factor of an opts object's PREMUL_SUM, in place, and returns the operator that is left to do.

    The factor is one of the tensors' type, as it is NCCL's; torch keeps it where only pickling shows it."""
    op, factor = getattr(opts, "reduceOp", opts).__getstate__()
    for tensor in tensors:
        if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise InvalidArgument(f"{call}: rank {rank}: {op} of {tensor.dtype}, expected float16, bfloat16, float32 or float64")
        with torch.inference_mode():
            tensor.mul_(factor.to(tensor.dtype) if isinstance(factor, torch.Tensor) else torch.tensor(factor, dtype=tensor.dtype))
    return "sum"


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


def is_plain(tensor):
    """Whether the memory holds the values as they are, in their order: torch may read them transposed, conjugated, negated."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def plain(tensor):
    """The tensor, or a copy that is plain."""
    if is_plain(tensor):
        return tensor
    with torch.no_grad():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class Plain:
    """Plain tensors in the place of those of a call. ``back`` copies what the call has written to where it belongs."""

    def __init__(self, reads, writes):
        self.reads = [plain(tensor) for tensor in reads]
        self.writes = [plain(tensor) for tensor in writes]
        self._back = [pair for pair in zip(writes, self.writes) if pair[0] is not pair[1]]

    def then(self, finish):
        """What is left to do at the end of the call, ``finish`` included; None: nothing."""
        if not self._back:
            return finish

        def back():
            for tensor, copy in self._back:
                tensor.copy_(copy)
            if finish is not None:
                finish()

        return back


def refusal(tensor, written):
    """The reason why a tensor cannot be part of a call; None: it can."""
    if tensor.layout is not torch.strided:
        return f"is of layout {tensor.layout}, expected torch.strided: pass tensor.to_dense(), or its indices() and values()"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"is on {tensor.device}, expected the CPU or a CUDA device"
    if tensor.is_nested:
        return "is a nested tensor, whose shapes would stay behind: pass its tensors one by one"
    if tensor.is_quantized:
        return f"is a quantized tensor of {tensor.dtype}, whose scale would stay behind: pass tensor.int_repr(), or tensor.dequantize()"
    if written and not tensor.is_contiguous() and _overlaps(tensor):
        return (
            f"of shape {tuple(tensor.shape)} with strides {tensor.stride()} has elements that share memory, so it cannot be written: "
            "pass tensor.clone()"
        )
    return None


def _overlaps(tensor):
    """Whether elements may share memory."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size == 0:
            return False
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
