//! The list of collectives. Every form of a call expands from it: blocking, asynchronous and grouped calls of a
//! [`Comm`](crate::Comm), those of a process group and of its batches, and the calls of a
//! `DeviceComm`.
//!
//! A new collective has its lines here, one for `apart` and one for `place`. Lengths and in-place form follow from its
//! [`Shape`](tinynccl_plan::algorithm::Shape); CONTRIBUTING.md, "Adding a collective", lists the other places.

/// Expands `$form! { lines }`. A line has the documentation of the blocking call, then
///
/// - `apart`: an input and an output; `place`: one buffer, by a name that ends in `_in_place`;
/// - the collective, and the arguments behind the buffers;
/// - the name of the blocking method and of the asynchronous one, which are the same on every type;
/// - `device` where `DeviceComm` has the method, else `-`.
#[doc(hidden)]
#[macro_export]
macro_rules! collectives {
    ($form:ident) => {
        $form! {
            /// Every rank's `output` becomes the element-wise reduction of all ranks' `input`; both of the same length.
            ///
            /// ```
            /// # extern crate tinynccl_comm as tinynccl;
            /// # use tinynccl::ReduceOp;
            /// # tinynccl::comm::on_threads(2, |comm| {
            /// // On each of two ranks:
            /// let mut sum = [0.0];
            /// comm.all_reduce(&[1.5 + comm.rank() as f32], &mut sum, ReduceOp::Sum)?;
            /// assert_eq!(sum, [1.5 + 2.5]);
            /// # Ok(())
            /// # }).unwrap();
            /// ```
            apart AllReduce(op: ReduceOp): all_reduce, all_reduce_async, device;
            /// [`Comm::all_reduce`] with one buffer for input and output.
            ///
            /// ```
            /// # extern crate tinynccl_comm as tinynccl;
            /// # use tinynccl::ReduceOp;
            /// # tinynccl::comm::on_threads(2, |comm| {
            /// let mut gradient = [comm.rank() as f32; 1000];
            /// comm.all_reduce_in_place(&mut gradient, ReduceOp::Avg)?;
            /// assert_eq!(gradient, [0.5; 1000]);
            /// # Ok(())
            /// # }).unwrap();
            /// ```
            place AllReduce(op: ReduceOp): all_reduce_in_place, all_reduce_in_place_async, device;
            /// Every rank's `output` (`n` x the input's length) becomes all ranks' `input`, in rank order.
            ///
            /// ```
            /// # extern crate tinynccl_comm as tinynccl;
            /// # use tinynccl::ReduceOp;
            /// # tinynccl::comm::on_threads(2, |comm| {
            /// let mut all = [0; 4];
            /// comm.all_gather(&[comm.rank() as i32, 7], &mut all)?;
            /// assert_eq!(all, [0, 7, 1, 7]);
            /// # Ok(())
            /// # }).unwrap();
            /// ```
            apart AllGather(): all_gather, all_gather_async, device;
            /// [`Comm::all_gather`] where our input already lies at segment `rank` of `buffer`.
            ///
            /// ```
            /// # extern crate tinynccl_comm as tinynccl;
            /// # use tinynccl::ReduceOp;
            /// # tinynccl::comm::on_threads(2, |comm| {
            /// let mut all = [0, 0];
            /// all[comm.rank()] = 1 + comm.rank() as u64;
            /// comm.all_gather_in_place(&mut all)?;
            /// assert_eq!(all, [1, 2]);
            /// # Ok(())
            /// # }).unwrap();
            /// ```
            place AllGather(): all_gather_in_place, all_gather_in_place_async, device;
            /// `output` becomes segment `rank` of the reduction of all ranks' `input` (`n` x the output's length).
            ///
            /// ```
            /// # extern crate tinynccl_comm as tinynccl;
            /// # use tinynccl::ReduceOp;
            /// # tinynccl::comm::on_threads(2, |comm| {
            /// let mut mine = [0];
            /// comm.reduce_scatter(&[10, 20], &mut mine, ReduceOp::Sum)?;
            /// assert_eq!(mine, [[20], [40]][comm.rank()]);
            /// # Ok(())
            /// # }).unwrap();
            /// ```
            apart ReduceScatter(op: ReduceOp): reduce_scatter, reduce_scatter_async, device;
            /// [`Comm::reduce_scatter`] whose result replaces segment `rank` of `buffer`; the other segments are left
            /// as they were.
            ///
            /// ```
            /// # extern crate tinynccl_comm as tinynccl;
            /// # use tinynccl::ReduceOp;
            /// # tinynccl::comm::on_threads(2, |comm| {
            /// let mut buffer = [10, 20];
            /// comm.reduce_scatter_in_place(&mut buffer, ReduceOp::Sum)?;
            /// assert_eq!(buffer[comm.rank()], [20, 40][comm.rank()]);
            /// # Ok(())
            /// # }).unwrap();
            /// ```
            place ReduceScatter(op: ReduceOp): reduce_scatter_in_place, reduce_scatter_in_place_async, device;
            /// Every rank's `output` becomes the root's `input`, which is ignored elsewhere and may be empty.
            ///
            /// ```
            /// # extern crate tinynccl_comm as tinynccl;
            /// # use tinynccl::ReduceOp;
            /// # tinynccl::comm::on_threads(2, |comm| {
            /// let mut output = [0u8; 4];
            /// comm.broadcast(b"word", &mut output, 0)?;
            /// assert_eq!(&output, b"word");
            /// # Ok(())
            /// # }).unwrap();
            /// ```
            apart Broadcast(root: usize): broadcast, broadcast_async, device;
            /// [`Comm::broadcast`] with one buffer for input and output: every rank's `buffer` becomes the root's.
            ///
            /// ```
            /// # extern crate tinynccl_comm as tinynccl;
            /// # use tinynccl::ReduceOp;
            /// # tinynccl::comm::on_threads(2, |comm| {
            /// let mut weights = [comm.rank() as f32; 3];
            /// comm.broadcast_in_place(&mut weights, 1)?;
            /// assert_eq!(weights, [1.0; 3]);
            /// # Ok(())
            /// # }).unwrap();
            /// ```
            place Broadcast(root: usize): broadcast_in_place, broadcast_in_place_async, device;
            /// The root's `output` becomes the reduction of all ranks' `input`; `output` is ignored (and may be empty)
            /// elsewhere.
            ///
            /// ```
            /// # extern crate tinynccl_comm as tinynccl;
            /// # use tinynccl::ReduceOp;
            /// # tinynccl::comm::on_threads(2, |comm| {
            /// let mut largest = [0.0];
            /// comm.reduce(&[comm.rank() as f64], &mut largest, ReduceOp::Max, 0)?;
            /// assert_eq!(largest, [[1.0], [0.0]][comm.rank()]);
            /// # Ok(())
            /// # }).unwrap();
            /// ```
            apart Reduce(op: ReduceOp, root: usize): reduce, reduce_async, device;
            /// [`Comm::reduce`] whose result replaces the root's `buffer`; elsewhere `buffer` is left as it was.
            ///
            /// ```
            /// # extern crate tinynccl_comm as tinynccl;
            /// # use tinynccl::ReduceOp;
            /// # tinynccl::comm::on_threads(2, |comm| {
            /// let mut buffer = [3u32];
            /// comm.reduce_in_place(&mut buffer, ReduceOp::Prod, 0)?;
            /// assert_eq!(buffer, [[9], [3]][comm.rank()]);
            /// # Ok(())
            /// # }).unwrap();
            /// ```
            place Reduce(op: ReduceOp, root: usize): reduce_in_place, reduce_in_place_async, device;
            /// All to one: the root's `output` (`n` x the input's length) becomes all ranks' `input`, in rank order.
            /// `output` is ignored elsewhere.
            ///
            /// ```
            /// # extern crate tinynccl_comm as tinynccl;
            /// # use tinynccl::ReduceOp;
            /// # tinynccl::comm::on_threads(2, |comm| {
            /// let mut all = vec![0u8; if comm.rank() == 0 { 2 } else { 0 }];
            /// comm.gather(&[b'a' + comm.rank() as u8], &mut all, 0)?;
            /// assert!(comm.rank() != 0 || all == b"ab");
            /// # Ok(())
            /// # }).unwrap();
            /// ```
            apart Gather(root: usize): gather, gather_async, device;
            /// [`Comm::gather`] where the root's own input already lies at segment `root` of its `buffer` (`n`
            /// segments); elsewhere `buffer` is the input, one segment.
            place Gather(root: usize): gather_in_place, gather_in_place_async, device;
            /// One to all: `output` becomes segment `rank` of the root's `input` (`n` x the output's length; ignored
            /// elsewhere).
            ///
            /// ```
            /// # extern crate tinynccl_comm as tinynccl;
            /// # use tinynccl::ReduceOp;
            /// # tinynccl::comm::on_threads(2, |comm| {
            /// let mut mine = [0];
            /// comm.scatter(&[5, 6], &mut mine, 0)?;
            /// assert_eq!(mine, [5 + comm.rank() as i32]);
            /// # Ok(())
            /// # }).unwrap();
            /// ```
            apart Scatter(root: usize): scatter, scatter_async, device;
            /// [`Comm::scatter`] from the root's `buffer` (`n` segments), whose own segment stays where it is;
            /// elsewhere `buffer` is the output, one segment.
            place Scatter(root: usize): scatter_in_place, scatter_in_place_async, device;
            /// Segment `s` of `output` becomes segment `rank` of rank `s`'s `input`; both have `n` equal segments.
            ///
            /// ```
            /// # extern crate tinynccl_comm as tinynccl;
            /// # use tinynccl::ReduceOp;
            /// # tinynccl::comm::on_threads(2, |comm| {
            /// let rank = comm.rank() as i32;
            /// let mut from = [0, 0];
            /// comm.all_to_all(&[10 * rank, 10 * rank + 1], &mut from)?;
            /// assert_eq!(from, [rank, 10 + rank]);
            /// # Ok(())
            /// # }).unwrap();
            /// ```
            apart AllToAll(): all_to_all, all_to_all_async, device;
            /// `output` becomes the element-wise reduction of the inputs of ranks `0..=rank` (MPI's inclusive scan).
            /// There is no average of some of the ranks.
            ///
            /// ```
            /// # extern crate tinynccl_comm as tinynccl;
            /// # use tinynccl::ReduceOp;
            /// # tinynccl::comm::on_threads(2, |comm| {
            /// let mut sum = [0];
            /// comm.scan(&[1], &mut sum, ReduceOp::Sum)?;
            /// assert_eq!(sum, [comm.rank() as i32 + 1]);
            /// # Ok(())
            /// # }).unwrap();
            /// ```
            apart Scan(op: ReduceOp): scan, scan_async, -;
            /// [`Comm::scan`] with one buffer for input and output.
            place Scan(op: ReduceOp): scan_in_place, scan_in_place_async, -;
        }
    };
}

/// The call of a line, still without memory.
#[doc(hidden)]
#[macro_export]
macro_rules! asked {
    ($collective:ident $(, $arg:ident)*) => {
        $crate::Call {
            $($arg: $arg.into(),)*
            ..$crate::Call::of($crate::wire::Collective::$collective)
        }
    };
}

pub use {asked, collectives};
