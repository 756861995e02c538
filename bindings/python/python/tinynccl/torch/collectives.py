"""The collectives of a process group, as torch calls them."""

import math

import torch
from torch.distributed import AllreduceOptions

from .. import InvalidArgument, Mismatch
from .tensors import PREMUL, as_list, is_plain, operator, plain, premultiply, real, spread
from .work import Work

# torch 2 says whether it will wait.
_SAYS = hasattr(AllreduceOptions, "asyncOp")


class Collectives:
    """What ``ProcessGroup`` inherits; it makes the calls by ``_run`` and ``_group``."""

    def allreduce(self, tensors, opts=None):
        if type(tensors) is not list:
            tensors = as_list(tensors)
        if len(tensors) != 1:
            return self.allreduce_coalesced(tensors, opts)
        one = tensors[0]
        op = operator(opts, self._me, "all_reduce", one)
        # What `_run` does, shorter, as gradients come this way: the memory is checked where it is taken.
        try:
            if one.is_sparse or op == PREMUL or one.is_complex():
                pass
            elif one.is_cuda:
                return self._all_reduce_on_stream(tensors, one, op)
            elif one.is_cpu:
                if self._deferred:
                    self._flush()
                if _SAYS and opts is not None and not opts.asyncOp:
                    self._comm.all_reduce(one, None, op)
                    self._number += 1
                    return None
                work = self._comm.all_reduce(one, None, op, async_op=True)
                self._number += 1
                return Work.of(work, tensors, self._kept)
        except InvalidArgument:
            if is_plain(one):
                raise
        if one.is_sparse and one.is_cpu:
            return self._sparse_all_reduce(tensors, op)

        def make(_, written, **how):
            left = premultiply(opts, written, self._me, "all_reduce") if op == PREMUL else op
            return self._comm.all_reduce(real(written[0]), None, left, **how)

        return self._run("all_reduce", [], tensors, tensors, make)

    def _all_reduce_on_stream(self, tensors, one, op):
        """What `_run` does, in fewer steps: none of them is in a cache when backward comes here."""
        if self._deferred:
            self._flush()
        side = self._sides[one.device]
        end = self._comm.all_reduce(one, None, op, stream=side.behind_current())
        self._number += 1
        one.record_stream(side.stream)
        return Work.of(None, tensors, self._kept, end, side)

    def _sparse_all_reduce(self, tensors, op):
        """The sum of all ranks' elements, wherever they lie. Not asynchronous: lengths must be known first."""
        tensor, n = tensors[0], self._size
        self._number += 1
        self._flush()
        if op not in ("sum", "avg"):
            raise InvalidArgument(f"all_reduce: rank {self._me}: {op} of a sparse tensor, expected SUM or AVG")
        mine = tensor.coalesce()
        indices, values = plain(mine.indices().t()), plain(mine.values())
        shape = [mine.sparse_dim(), *tensor.shape]
        facts = torch.tensor([len(values), *shape])
        all_facts = torch.empty(n, len(facts), dtype=facts.dtype)
        self._comm.all_gather(facts, all_facts)
        all_facts = all_facts.tolist()
        for rank, facts in enumerate(all_facts):
            if facts[1:] != shape:
                raise Mismatch(
                    f"all_reduce: rank {self._me} and rank {rank} disagree: sparse tensors of {shape[0]} sparse dimensions and "
                    f"shape {shape[1:]}, and of {facts[1]} and {facts[2:]}"
                )
        counts = [facts[0] for facts in all_facts]
        all_indices = indices.new_empty(sum(counts), shape[0])
        all_values = values.new_empty(sum(counts), *values.shape[1:])
        width = math.prod(values.shape[1:])
        self._comm.all_gather(indices, all_indices, [count * shape[0] for count in counts])
        self._comm.all_gather(values, all_values, [count * width for count in counts])
        floats = all_values.is_floating_point() or all_values.is_complex()
        if op == "avg" and floats:
            # As of dense tensors: before the sum, in the tensors' type.
            parts = real(all_values)
            parts.mul_(torch.tensor(1 / n, dtype=parts.dtype))
        summed = torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape).coalesce()
        if op == "avg" and not floats:
            quotients = torch.div(summed.values(), n, rounding_mode="trunc")
            summed = torch.sparse_coo_tensor(summed.indices(), quotients, tensor.shape)
        with torch.no_grad():
            tensor.copy_(summed)
        return Work.of(None, tensors, self._kept)

    def allreduce_coalesced(self, tensors, opts=None):
        tensors = as_list(tensors)
        op = operator(opts, self._me, "all_reduce", *tensors)

        def make(_, written, **how):
            left = premultiply(opts, written, self._me, "all_reduce") if op == PREMUL else op
            return self._together(lambda tensor, **how: self._comm.all_reduce(real(tensor), op=left, **how), written, **how)

        return self._run("all_reduce", [], tensors, tensors, make)

    def broadcast(self, tensors, opts=None):
        tensors = as_list(tensors)
        root = getattr(opts, "rootRank", opts) or 0

        def make(_, written, **how):
            return self._together(lambda tensor, **how: self._comm.broadcast(tensor, root, **how), written, **how)

        return self._run("broadcast", [], tensors, tensors, make)

    def reduce(self, tensors, opts=None):
        tensors = as_list(tensors)
        one = tensors[0]
        op = operator(opts, self._me, "reduce", one)
        root = getattr(opts, "rootRank", 0)

        def make(read, written, **how):
            left, mine = op, [*read, *written]
            if op == PREMUL:
                # Only the root's tensor is to change.
                mine = written or [tensor.clone() for tensor in read]
                left = premultiply(opts, mine, self._me, "reduce")
            return self._comm.reduce(real(mine[0]), op=left, root=root, **how)

        sides = ([], [one]) if self._rank == root else ([one], [])
        return self._run("reduce", *sides, tensors, make)

    def _allgather_base(self, output, input, opts=None):
        return self._run("all_gather", [input], [output], output, lambda read, written, **how: self._comm.all_gather(*read, *written, **how))

    # Newer names of the same.
    def allgather_into_tensor(self, output, input, opts=None):
        return self._allgather_base(output, input, opts)

    all_gather_single = allgather_into_tensor

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        return self._many("all_gather", inputs, outputs, self._comm.all_gather)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def allgather(self, outputs, inputs, opts=None):
        """Lists of tensors: one list of ``size`` per input."""
        inputs = as_list(inputs)
        if outputs and isinstance(outputs[0], torch.Tensor):
            outputs = [outputs]
        if len(inputs) != 1 or len(outputs) != 1:
            raise InvalidArgument(
                f"all_gather: rank {self._me}: {len(inputs)} inputs and {len(outputs)} lists of outputs, expected one of each"
            )
        return self._gather_lists("all_gather", inputs[0], outputs[0], outputs)

    def _gather_lists(self, call, input, parts, result):
        if len(parts) != self._size:
            raise InvalidArgument(f"{call}: rank {self._me}: {len(parts)} output tensors, expected {self._size}, one per rank")
        self._like(call, parts, input)
        if all(part.numel() == input.numel() for part in parts):
            counts = []
        else:
            counts = [[part.numel() for part in parts]]
        flat = torch.empty(sum(part.numel() for part in parts), dtype=input.dtype, device=input.device)
        return self._run(
            call,
            [input],
            [],
            result,
            lambda read, _, **how: self._comm.all_gather(*read, flat, *counts, **how),
            lambda: spread(flat, parts),
            [flat],
            parts,
        )

    def allgather_coalesced(self, outputs, inputs, opts=None):
        """``outputs[r][i]`` becomes rank r's ``inputs[i]``."""
        flats = [torch.empty(self._size * t.numel(), dtype=t.dtype, device=t.device) for t in inputs]

        def finish():
            for i, flat in enumerate(flats):
                spread(flat, [of_rank[i] for of_rank in outputs])

        def make(read, _, **how):
            return self._together(self._comm.all_gather, read, flats, **how)

        parts = [part for of_rank in outputs for part in of_rank]
        return self._run("all_gather", list(inputs), [], outputs, make, finish, flats, parts)

    def _reduce_scatter_base(self, output, input, opts=None):
        op = operator(opts, self._me, "reduce_scatter", input)

        def make(read, written, **how):
            return self._reduce_scatter(opts, op, *read, *written, **how)

        return self._run("reduce_scatter", [input], [output], output, make)

    def _reduce_scatter(self, opts, op, input, output, **how):
        """``input`` and ``output`` are plain."""
        if op == PREMUL:
            input = input.clone()
            op = premultiply(opts, [input], self._me, "reduce_scatter")
        return self._comm.reduce_scatter(real(input), real(output), op, **how)

    def reduce_scatter_tensor(self, output, input, opts=None):
        return self._reduce_scatter_base(output, input, opts)

    reduce_scatter_single = reduce_scatter_tensor

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None):
        inputs = as_list(inputs)
        op = operator(opts, self._me, "reduce_scatter", *inputs)
        return self._many(
            "reduce_scatter",
            inputs,
            outputs,
            lambda input, output, **how: self._reduce_scatter(opts, op, input, output, **how),
        )

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def reduce_scatter(self, outputs, inputs, opts=None):
        """One list of ``size`` inputs per output."""
        outputs = as_list(outputs)
        if inputs and isinstance(inputs[0], torch.Tensor):
            inputs = [inputs]
        output, parts = outputs[0], inputs[0]
        op = operator(opts, self._me, "reduce_scatter", output)
        if len(parts) != self._size:
            raise InvalidArgument(f"reduce_scatter: rank {self._me}: {len(parts)} input tensors, expected {self._size}, one per rank")
        self._like("reduce_scatter", parts, output)
        self._check("reduce_scatter", parts)
        if any(part.numel() != output.numel() for part in parts):
            if parts[self._rank].numel() != output.numel():
                raise InvalidArgument(
                    f"reduce_scatter: rank {self._me}: the output has {output.numel()} elements, input {self._rank} "
                    f"{parts[self._rank].numel()}: expected equal lengths"
                )

            # Of each rank's part only its own rank's copy becomes the sum.
            held = [_flat([part]) for part in parts]

            def make(_, written, **how):
                left = premultiply(opts, held, self._me, "reduce_scatter") if op == PREMUL else op

                def calls():
                    for root, copy in enumerate(held):
                        self._comm.reduce(real(copy), op=left, root=root)

                return self._group(calls, **how)

            return self._run(
                "reduce_scatter",
                [],
                [],
                outputs,
                make,
                lambda: output.copy_(held[self._rank].view(output.shape)),
                held,
                [output],
            )
        flat = _flat(parts)
        return self._run(
            "reduce_scatter",
            [],
            [output],
            outputs,
            lambda _, written, **how: self._reduce_scatter(opts, op, flat, *written, **how),
            scratch=[flat],
        )

    def gather(self, outputs, inputs, opts=None):
        input = as_list(inputs)[0]
        root = getattr(opts, "rootRank", 0)
        if self._rank != root:
            return self._run("gather", [input], [], outputs, lambda read, _, **how: self._comm.gather(*read, None, root, **how))
        parts = outputs[0] if outputs and not isinstance(outputs[0], torch.Tensor) else outputs
        if len(parts) != self._size:
            raise InvalidArgument(f"gather: rank {self._me}: {len(parts)} output tensors, expected {self._size}, one per rank")
        self._like("gather", parts, input, lengths=True)
        flat = torch.empty(self._size * input.numel(), dtype=input.dtype, device=input.device)
        return self._run(
            "gather",
            [input],
            [],
            outputs,
            lambda read, _, **how: self._comm.gather(*read, flat, root, **how),
            lambda: spread(flat, parts),
            [flat],
            parts,
        )

    def gather_single(self, output, input, opts=None):
        root = getattr(opts, "rootRank", 0)
        output = [output] if self._rank == root else []

        def make(read, written, **how):
            return self._comm.gather(*read, *(written or [None]), root, **how)

        return self._run("gather", [input], output, output[0] if output else None, make)

    def scatter(self, outputs, inputs, opts=None):
        output = as_list(outputs)[0]
        root = getattr(opts, "rootRank", 0)
        if self._rank != root:
            return self._run("scatter", [], [output], outputs, lambda _, written, **how: self._comm.scatter(None, *written, root, **how))
        parts = inputs[0] if inputs and not isinstance(inputs[0], torch.Tensor) else inputs
        if len(parts) != self._size:
            raise InvalidArgument(f"scatter: rank {self._me}: {len(parts)} input tensors, expected {self._size}, one per rank")
        self._like("scatter", parts, output, lengths=True)
        self._check("scatter", parts)
        flat = _flat(parts)
        return self._run(
            "scatter",
            [],
            [output],
            outputs,
            lambda _, written, **how: self._comm.scatter(flat, *written, root, **how),
            scratch=[flat],
        )

    def alltoall_base(self, output, input, output_splits=None, input_splits=None, opts=None):
        """Always by lengths, as other ranks may have been given some."""
        counts = []
        for which, tensor, splits in (("output", output, output_splits), ("input", input, input_splits)):
            rows = tensor.shape[0] if tensor.dim() else 1
            splits = list(splits) if splits else [rows // self._size] * self._size
            if len(splits) != self._size or sum(splits) != rows:
                raise InvalidArgument(
                    f"all_to_all: rank {self._me}: the {which} has {rows} rows and splits {splits}, expected {self._size} "
                    "splits that add up to it"
                )
            row = tensor.numel() // rows if rows else 0
            counts.append([split * row for split in splits])
        recv, send = counts

        def make(read, written, **how):
            return self._comm.all_to_all(*read, *written, send, recv, **how)

        return self._run("all_to_all", [input], [output], output, make)

    all_to_all_single = alltoall_base

    def alltoall(self, outputs, inputs, opts=None):
        if len(outputs) != self._size or len(inputs) != self._size:
            raise InvalidArgument(
                f"all_to_all: rank {self._me}: {len(inputs)} inputs and {len(outputs)} outputs, expected {self._size} of each"
            )
        self._like("all_to_all", [*outputs, *inputs], inputs[0])
        self._check("all_to_all", inputs)
        flat_in = _flat(inputs)
        flat_out = torch.empty(sum(t.numel() for t in outputs), dtype=flat_in.dtype, device=flat_in.device)
        send, recv = [t.numel() for t in inputs], [t.numel() for t in outputs]
        return self._run(
            "all_to_all",
            [],
            [],
            outputs,
            lambda _read, _written, **how: self._comm.all_to_all(flat_in, flat_out, send, recv, **how),
            lambda: spread(flat_out, outputs),
            [flat_in, flat_out],
            outputs,
        )

    def barrier(self, opts=None):
        self._number += 1
        self._flush()
        for device in self._sides:
            torch.cuda.current_stream(device).synchronize()
        return Work.of(self._comm.barrier(async_op=True), [], self._kept)

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        """The error at the deadline names the ranks that have not come."""
        # torch's dispatcher passes it in an object of options.
        self.barrier().wait(getattr(timeout, "timeout", timeout))

    def _many(self, call, inputs, outputs, one):
        inputs, outputs = as_list(inputs), as_list(outputs)
        return self._run(call, inputs, outputs, outputs, lambda read, written, **how: self._together(one, read, written, **how))

    def _together(self, one, *lists, **how):
        """``one`` for each element of the lists, as a group. Another rank may make a group of one call as a call."""
        if len(lists[0]) == 1:
            return one(*(values[0] for values in lists), **how)

        def calls():
            for values in zip(*lists):
                one(*values)

        return self._group(calls, **how)

    def _like(self, call, tensors, like, lengths=False):
        for index, tensor in enumerate(tensors):
            if tensor.dtype != like.dtype or tensor.device != like.device or (lengths and tensor.numel() != like.numel()):
                raise InvalidArgument(
                    f"{call}: rank {self._me}: tensor {index} of the list is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, "
                    f"expected {like.dtype} {tuple(like.shape)} on {like.device}"
                )


def _flat(parts):
    """All values of ``parts``, one after the other, in memory of ours."""
    with torch.no_grad():
        return torch.cat([plain(part).view(-1) for part in parts])
