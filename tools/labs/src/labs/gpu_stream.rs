//! Gradients that are computed in one stream and summed in another.

use anyhow::{Result, bail};
use cudarc::driver::{DevicePtr as _, LaunchConfig, PushKernelArg as _};
use tinynccl::process_group::BufferMut;
use tinynccl::{DType, ReduceOp};

use crate::gpu::{Options, kernel};
use crate::ranks::Announced;

const ELEMENTS: usize = 1 << 20;
/// Nanoseconds of the backward pass.
const BUSY: u64 = 200_000_000;

pub(crate) fn run(options: &Options) -> Result<u8> {
    options.run(|group, context| {
        let rank = group.rank();
        let (compute, communication) = (context.new_stream()?, context.new_stream()?);
        let backward = kernel(context, "backward")?;
        let mut gradients = compute.alloc_zeros::<f32>(ELEMENTS)?;
        // The first call opens what the group needs: that is not this lab's subject.
        compute.synchronize()?;
        group.all_reduce_in_place(BufferMut::device(&communication, &mut gradients), ReduceOp::Sum)?;

        let (n, value) = (ELEMENTS as u64, rank as f32 + 1.0);
        let mut launch = compute.launch_builder(&backward);
        launch.arg(&mut gradients).arg(&n).arg(&value).arg(&BUSY);
        // SAFETY: the kernel's parameters, in its order; it writes `n` elements.
        unsafe { launch.launch(LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1024, 1, 1), shared_mem_bytes: 0 }) }?;
        println!("rank {rank}: backward is in one stream, all_reduce in another");
        if options.fixed {
            communication.wait(&compute.record_event(None)?)?;
        }
        let address = gradients.device_ptr(&communication).0;
        // SAFETY: `ELEMENTS` f32 of this GPU, which stay until both streams have ended. That the streams are not
        // ordered without --fixed makes values wrong, as this lab shows, and nothing else.
        let buffer = unsafe { BufferMut::from_address(&communication, DType::F32, address, ELEMENTS) };
        group.all_reduce_in_place(buffer, ReduceOp::Sum)?;
        let sums = communication.clone_dtoh(&gradients)?;
        communication.synchronize()?;
        compute.synchronize()?;
        match sums.iter().find(|&&sum| sum != 3.0) {
            Some(sum) => bail!(Announced(format!("rank {rank}: a sum is {sum}, expected 3, and no call has failed"))),
            None => println!("rank {rank}: every sum is 3"),
        }
        Ok(())
    })
}
