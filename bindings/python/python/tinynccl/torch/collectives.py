"""The collectives of a process group, as torch calls them."""

import math

import torch
from torch.distributed import AllreduceOptions

from .. import InvalidArgument, Mismatch
from .tensors import PREMUL, as_list, operator, premultiply, real, spread
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
        op = operator(opts, self._rank, "all_reduce", one)
        if op == PREMUL:
            op = premultiply(opts, tensors, self._rank, "all_reduce")
        # What `_run` does, shorter, as gradients come this way: the layout is checked where the memory is taken.
        if not one.is_cpu:
            return self._all_reduce_on_stream(tensors, one, op)
        if one.is_sparse:
            return self._sparse_all_reduce(tensors, op)
        self._number += 1
        if self._deferred:
            self._flush()
        if one.is_complex():
            one = real(one)
        if _SAYS and opts is not None and not opts.asyncOp:
            self._comm.all_reduce(one, None, op)
            return None
        return Work.of(self._comm.all_reduce(one, None, op, async_op=True), tensors, self._kept)

    def _all_reduce_on_stream(self, tensors, one, op):
        """What `_run` does, in fewer steps: none of them is in a cache when backward comes here."""
        self._number += 1
        if self._deferred:
            self._flush()
        side = self._sides[one.device]
        end = self._comm.all_reduce(real(one), None, op, stream=side.behind_current())
        one.record_stream(side.stream)
        return Work.of(None, tensors, self._kept, end, side)

    def _sparse_all_reduce(self, tensors, op):
        """The sum of all ranks' elements, wherever they lie. Not asynchronous: lengths must be known first."""
        tensor, n = tensors[0], self._size
        if op not in ("sum", "avg"):
            raise InvalidArgument(f"all_reduce: rank {self._rank}: {op} of a sparse tensor, expected SUM or AVG")
        mine = tensor.coalesce()
        indices, values = mine.indices().t().contiguous(), mine.values().contiguous()
        shape = [mine.sparse_dim(), *tensor.shape]
        facts = torch.tensor([len(values), *shape])
        all_facts = torch.empty(n, len(facts), dtype=facts.dtype)
        self._comm.all_gather(facts, all_facts)
        all_facts = all_facts.tolist()
        for rank, facts in enumerate(all_facts):
            if facts[1:] != shape:
                raise Mismatch(
                    f"all_reduce: rank {self._rank} and rank {rank} disagree: sparse tensors of {shape[0]} sparse dimensions and "
                    f"shape {shape[1:]}, and of {facts[1]} and {facts[2:]}"
                )
        counts = [facts[0] for facts in all_facts]
        all_indices = indices.new_empty(sum(counts), shape[0])
        all_values = values.new_empty(sum(counts), *values.shape[1:])
        width = math.prod(values.shape[1:])
        self._comm.all_gather(indices, all_indices, [count * shape[0] for count in counts])
        self._comm.all_gather(values, all_values, [count * width for count in counts])
        summed = torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape).coalesce()
        tensor.copy_(summed / n if op == "avg" else summed)
        return Work.of(None, tensors, self._kept)

    def allreduce_coalesced(self, tensors, opts=None):
        tensors = as_list(tensors)
        op = operator(opts, self._rank, "all_reduce", *tensors)
        if op == PREMUL:
            op = premultiply(opts, tensors, self._rank, "all_reduce")

        def calls():
            for tensor in tensors:
                self._comm.all_reduce(real(tensor), op=op)

        return self._run("all_reduce", tensors, tensors, lambda **how: self._group(calls, **how))

    def broadcast(self, tensors, opts=None):
        tensors = as_list(tensors)
        root = getattr(opts, "rootRank", opts) or 0

        def calls():
            for tensor in tensors:
                self._comm.broadcast(tensor, root)

        if len(tensors) == 1:
            return self._run("broadcast", tensors, tensors, lambda **how: self._comm.broadcast(tensors[0], root, **how))
        return self._run("broadcast", tensors, tensors, lambda **how: self._group(calls, **how))

    def reduce(self, tensors, opts=None):
        tensors = as_list(tensors)
        one = tensors[0]
        op = operator(opts, self._rank, "reduce", one)
        root = getattr(opts, "rootRank", 0)
        if op == PREMUL:
            # Only the root's tensor is to change.
            one = one if self._rank == root else one.clone()
            op = premultiply(opts, [one], self._rank, "reduce")
        return self._run("reduce", [one], tensors, lambda **how: self._comm.reduce(real(one), op=op, root=root, **how))

    def _allgather_base(self, output, input, opts=None):
        return self._run("all_gather", [input, output], output, lambda **how: self._comm.all_gather(input, output, **how))

    # Newer names of the same.
    def allgather_into_tensor(self, output, input, opts=None):
        return self._allgather_base(output, input, opts)

    all_gather_single = allgather_into_tensor

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        return self._many(
            "all_gather", inputs, outputs, lambda input, output: self._comm.all_gather(input, output), outputs
        )

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def allgather(self, outputs, inputs, opts=None):
        """Lists of tensors: one list of ``size`` per input."""
        inputs = as_list(inputs)
        if outputs and isinstance(outputs[0], torch.Tensor):
            outputs = [outputs]
        if len(inputs) != 1 or len(outputs) != 1:
            raise InvalidArgument(
                f"all_gather: rank {self._rank}: {len(inputs)} inputs and {len(outputs)} lists of outputs, expected one of each"
            )
        return self._gather_lists("all_gather", inputs[0], outputs[0], outputs)

    def _gather_lists(self, call, input, parts, result):
        if len(parts) != self._size:
            raise InvalidArgument(f"{call}: rank {self._rank}: {len(parts)} output tensors, expected {self._size}, one per rank")
        self._like(call, parts, input)
        if all(part.numel() == input.numel() for part in parts):
            flat = torch.empty(self._size * input.numel(), dtype=input.dtype, device=input.device)
            return self._run(
                call,
                [input, *parts],
                result,
                lambda **how: self._comm.all_gather(input, flat, **how),
                lambda: spread(flat, parts),
                [flat],
            )
        # Lengths that differ.
        flat = torch.empty(sum(part.numel() for part in parts), dtype=input.dtype, device=input.device)
        counts = [part.numel() for part in parts]
        return self._run(
            call,
            [input, *parts],
            result,
            lambda **how: self._comm.all_gather(input, flat, counts, **how),
            lambda: spread(flat, parts),
            [flat],
        )

    def allgather_coalesced(self, outputs, inputs, opts=None):
        """``outputs[r][i]`` becomes rank r's ``inputs[i]``."""
        flats = [torch.empty(self._size * t.numel(), dtype=t.dtype, device=t.device) for t in inputs]

        def finish():
            for i, flat in enumerate(flats):
                spread(flat, [of_rank[i] for of_rank in outputs])

        def calls():
            for input, flat in zip(inputs, flats):
                self._comm.all_gather(input, flat)

        return self._run("all_gather", list(inputs), outputs, lambda **how: self._group(calls, **how), finish, flats)

    def _reduce_scatter_base(self, output, input, opts=None):
        op = operator(opts, self._rank, "reduce_scatter", input)
        if op == PREMUL:
            input = input.clone()
            op = premultiply(opts, [input], self._rank, "reduce_scatter")
        return self._run(
            "reduce_scatter",
            [input, output],
            output,
            lambda **how: self._comm.reduce_scatter(real(input), real(output), op, **how),
        )

    def reduce_scatter_tensor(self, output, input, opts=None):
        return self._reduce_scatter_base(output, input, opts)

    reduce_scatter_single = reduce_scatter_tensor

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None):
        inputs = as_list(inputs)
        op = operator(opts, self._rank, "reduce_scatter", *inputs)
        if op == PREMUL:
            inputs = [input.clone() for input in inputs]
            op = premultiply(opts, inputs, self._rank, "reduce_scatter")
        return self._many(
            "reduce_scatter",
            inputs,
            outputs,
            lambda input, output: self._comm.reduce_scatter(real(input), real(output), op),
            outputs,
        )

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def reduce_scatter(self, outputs, inputs, opts=None):
        """One list of ``size`` inputs per output."""
        outputs = as_list(outputs)
        if inputs and isinstance(inputs[0], torch.Tensor):
            inputs = [inputs]
        output, parts = outputs[0], inputs[0]
        op = operator(opts, self._rank, "reduce_scatter", output)
        if op == PREMUL:
            parts = [part.clone() for part in parts]
            op = premultiply(opts, parts, self._rank, "reduce_scatter")
        if len(parts) != self._size:
            raise InvalidArgument(
                f"reduce_scatter: rank {self._rank}: {len(parts)} input tensors, expected {self._size}, one per rank"
            )
        self._like("reduce_scatter", parts, output)
        if any(part.numel() != output.numel() for part in parts):
            if parts[self._rank].numel() != output.numel():
                raise InvalidArgument(
                    f"reduce_scatter: rank {self._rank}: the output has {output.numel()} elements, input {self._rank} "
                    f"{parts[self._rank].numel()}: expected equal lengths"
                )

            # Of each rank's part only its own rank's copy becomes the sum.
            held = [part.clone().reshape(-1) for part in parts]

            def calls():
                for root, copy in enumerate(held):
                    self._comm.reduce(real(copy), op=op, root=root)

            return self._run(
                "reduce_scatter",
                [output, *parts],
                outputs,
                lambda **how: self._group(calls, **how),
                lambda: output.copy_(held[self._rank].view_as(output)),
                held,
            )
        flat = torch.cat([part.reshape(-1) for part in parts])
        return self._run(
            "reduce_scatter",
            [output, *parts],
            outputs,
            lambda **how: self._comm.reduce_scatter(real(flat), real(output), op, **how),
            scratch=[flat],
        )

    def gather(self, outputs, inputs, opts=None):
        input = as_list(inputs)[0]
        root = getattr(opts, "rootRank", 0)
        if self._rank != root:
            return self._run("gather", [input], outputs, lambda **how: self._comm.gather(input, None, root, **how))
        parts = outputs[0] if outputs and not isinstance(outputs[0], torch.Tensor) else outputs
        if len(parts) != self._size:
            raise InvalidArgument(f"gather: rank {self._rank}: {len(parts)} output tensors, expected {self._size}, one per rank")
        self._like("gather", parts, input, lengths=True)
        flat = torch.empty(self._size * input.numel(), dtype=input.dtype, device=input.device)
        return self._run(
            "gather",
            [input, *parts],
            outputs,
            lambda **how: self._comm.gather(input, flat, root, **how),
            lambda: spread(flat, parts),
            [flat],
        )

    def gather_single(self, output, input, opts=None):
        root = getattr(opts, "rootRank", 0)
        output = output if self._rank == root else None
        tensors = [input] if output is None else [input, output]
        return self._run("gather", tensors, output, lambda **how: self._comm.gather(input, output, root, **how))

    def scatter(self, outputs, inputs, opts=None):
        output = as_list(outputs)[0]
        root = getattr(opts, "rootRank", 0)
        if self._rank != root:
            return self._run("scatter", [output], outputs, lambda **how: self._comm.scatter(None, output, root, **how))
        parts = inputs[0] if inputs and not isinstance(inputs[0], torch.Tensor) else inputs
        if len(parts) != self._size:
            raise InvalidArgument(f"scatter: rank {self._rank}: {len(parts)} input tensors, expected {self._size}, one per rank")
        self._like("scatter", parts, output, lengths=True)
        flat = torch.cat([part.reshape(-1) for part in parts])
        return self._run(
            "scatter",
            [output, *parts],
            outputs,
            lambda **how: self._comm.scatter(flat, output, root, **how),
            scratch=[flat],
        )

    def alltoall_base(self, output, input, output_splits=None, input_splits=None, opts=None):
        if not output_splits and not input_splits:
            make = lambda **how: self._comm.all_to_all(input, output, **how)  # noqa: E731
        else:
            counts = []
            for which, tensor, splits in (("output", output, output_splits), ("input", input, input_splits)):
                rows = tensor.shape[0] if tensor.dim() else 1
                splits = list(splits) if splits else [rows // self._size] * self._size
                if len(splits) != self._size or sum(splits) != rows:
                    raise InvalidArgument(
                        f"all_to_all: rank {self._rank}: the {which} has {rows} rows and splits {splits}, expected {self._size} "
                        "splits that add up to it"
                    )
                row = tensor.numel() // rows if rows else 0
                counts.append([split * row for split in splits])
            make = lambda **how: self._comm.all_to_all(input, output, counts[1], counts[0], **how)  # noqa: E731
        return self._run("all_to_all", [input, output], output, make)

    all_to_all_single = alltoall_base

    def alltoall(self, outputs, inputs, opts=None):
        if len(outputs) != self._size or len(inputs) != self._size:
            raise InvalidArgument(
                f"all_to_all: rank {self._rank}: {len(inputs)} inputs and {len(outputs)} outputs, expected {self._size} of each"
            )
        self._like("all_to_all", [*outputs, *inputs], inputs[0])
        flat_in = torch.cat([t.reshape(-1) for t in inputs])
        flat_out = torch.empty(sum(t.numel() for t in outputs), dtype=flat_in.dtype, device=flat_in.device)
        send, recv = [t.numel() for t in inputs], [t.numel() for t in outputs]
        return self._run(
            "all_to_all",
            [*inputs, *outputs],
            outputs,
            lambda **how: self._comm.all_to_all(flat_in, flat_out, send, recv, **how),
            lambda: spread(flat_out, outputs),
            [flat_in, flat_out],
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

    def _many(self, call, inputs, outputs, one, result):
        inputs, outputs = as_list(inputs), as_list(outputs)

        def calls():
            for input, output in zip(inputs, outputs):
                one(input, output)

        return self._run(call, [*inputs, *outputs], result, lambda **how: self._group(calls, **how))

    def _like(self, call, tensors, like, lengths=False):
        for index, tensor in enumerate(tensors):
            if tensor.dtype != like.dtype or tensor.device != like.device or (lengths and tensor.numel() != like.numel()):
                raise InvalidArgument(
                    f"{call}: rank {self._rank}: tensor {index} of the list is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, "
                    f"expected {like.dtype} {tuple(like.shape)} on {like.device}"
                )
