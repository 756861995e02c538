//! The list of collectives. Every form of a call expands from it: blocking, asynchronous and grouped calls of a
//! [`Comm`](crate::comm::Comm), those of a process group and of its batches, and the calls of a
//! [`DeviceComm`](crate::cuda::DeviceComm).
//!
//! A new collective needs a line here and its [`Shape`](crate::algorithm::Shape), which determines lengths and in-place
//! form.

/// Expands `$form! { lines }`. A line has the documentation of the blocking call, then
///
/// - `apart`: an input and an output; `place`: one buffer;
/// - the collective, and the arguments behind the buffers;
/// - the names of the blocking method of `Comm`, of the asynchronous one, of the blocking method of `ProcessGroup` and
///   of its asynchronous one; `-` where there is none. Groups have the methods of `Comm`, batches those of
///   `ProcessGroup`;
/// - `device` where `DeviceComm` has the blocking method of `Comm`, else `-`.
macro_rules! collectives {
    ($form:ident) => {
        $form! {
            /// Every rank's `output` becomes the element-wise reduction of all ranks' `input`; both of the same length.
            apart AllReduce(op: ReduceOp): all_reduce, -, all_reduce_into, -, device;
            /// [`Comm::all_reduce`] with one buffer for input and output.
            place AllReduce(op: ReduceOp): all_reduce_in_place, all_reduce_async, all_reduce, all_reduce_async, device;
            /// Every rank's `output` (`n` x the input's length) becomes all ranks' `input`, in rank order.
            apart AllGather(): all_gather, all_gather_async, all_gather, all_gather_async, device;
            /// [`Comm::all_gather`] where our input already lies at segment `rank` of `buffer`.
            place AllGather(): all_gather_in_place, -, all_gather_in_place, -, -;
            /// `output` becomes segment `rank` of the reduction of all ranks' `input` (`n` x the output's length).
            apart ReduceScatter(op: ReduceOp):
                reduce_scatter, reduce_scatter_async, reduce_scatter, reduce_scatter_async, device;
            /// [`Comm::reduce_scatter`] whose result replaces segment `rank` of `buffer`; the other segments are left
            /// as they were.
            place ReduceScatter(op: ReduceOp): reduce_scatter_in_place, -, reduce_scatter_in_place, -, -;
            /// Every rank's `buffer` becomes the root's.
            place Broadcast(root: usize): broadcast, broadcast_async, broadcast, broadcast_async, device;
            /// [`Comm::broadcast`] from the root's `input` into every rank's `output`; `input` is ignored elsewhere.
            apart Broadcast(root: usize): broadcast_from, -, -, -, -;
            /// The root's `output` becomes the reduction of all ranks' `input`; `output` is ignored (and may be empty)
            /// elsewhere.
            apart Reduce(op: ReduceOp, root: usize): reduce, reduce_async, reduce_into, -, device;
            /// [`Comm::reduce`] whose result replaces the root's `buffer`; elsewhere `buffer` is left as it was.
            place Reduce(op: ReduceOp, root: usize): reduce_in_place, -, reduce, reduce_async, -;
            /// All to one: the root's `output` (`n` x the input's length) becomes all ranks' `input`, in rank order.
            /// `output` is ignored elsewhere.
            apart Gather(root: usize): gather, gather_async, gather, gather_async, -;
            /// [`Comm::gather`] where the root's own input already lies at segment `root` of its `buffer` (`n`
            /// segments); elsewhere
            /// `buffer` is the input, one segment.
            place Gather(root: usize): gather_in_place, -, -, -, -;
            /// One to all: `output` becomes segment `rank` of the root's `input` (`n` x the output's length; ignored
            /// elsewhere).
            apart Scatter(root: usize): scatter, scatter_async, scatter, scatter_async, -;
            /// [`Comm::scatter`] from the root's `buffer` (`n` segments), whose own segment stays where it is;
            /// elsewhere `buffer` is the output, one segment.
            place Scatter(root: usize): scatter_in_place, -, -, -, -;
            /// Segment `s` of `output` becomes segment `rank` of rank `s`'s `input`; both have `n` equal segments.
            apart AllToAll(): all_to_all, all_to_all_async, all_to_all, all_to_all_async, device;
            /// `output` becomes the element-wise reduction of the inputs of ranks `0..=rank` (MPI's inclusive scan).
            /// There is no average of some of the ranks.
            apart Scan(op: ReduceOp): scan, -, scan, -, -;
            /// [`Comm::scan`] with one buffer for input and output.
            place Scan(op: ReduceOp): scan_in_place, scan_async, scan_in_place, scan_async, -;
        }
    };
}

/// The call of a line, still without memory.
macro_rules! asked {
    ($collective:ident $(, $arg:ident)*) => {
        $crate::Call {
            $($arg: $arg.into(),)*
            ..$crate::Call::of($crate::wire::Collective::$collective)
        }
    };
}

pub(crate) use {asked, collectives};
