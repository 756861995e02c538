//! A kernel that holds every multiprocessor and waits for a message.

use anyhow::{Result, ensure};
use cudarc::driver::{DevicePtr as _, LaunchConfig, PushKernelArg as _};
use tinynccl::DType;
use tinynccl::process_group::{Buffer, BufferMut};

use crate::gpu::{Options, kernel, multiprocessors};

const TOKEN: u32 = 42;
/// Nanoseconds after which the kernel gives up, so that the GPU gets free: longer than the calls wait.
const LIMIT: u64 = 8_000_000_000;
/// Multiprocessors that the mended version leaves to others.
const FREE: u32 = 32;

pub(crate) fn run(options: &Options) -> Result<u8> {
    options.run(|group, context| {
        let (compute, communication) = (context.new_stream()?, context.new_stream()?);
        let await_word = kernel(context, "await_word")?;
        let mut word = communication.alloc_zeros::<u32>(1)?;
        // The first message opens what the pair needs: that is not this lab's subject.
        match group.rank() {
            0 => group.send(Buffer::device(&communication, &word), 1)?,
            _ => group.recv(BufferMut::device(&communication, &mut word), 0)?,
        }
        if group.rank() == 0 {
            let token = communication.clone_htod(&[TOKEN])?;
            group.comm().recv(&mut [0u8], 1)?;
            group.send(Buffer::device(&communication, &token), 1)?;
            println!("rank 0: the token is sent");
            return Ok(());
        }
        let mut seen = communication.alloc_zeros::<u32>(1)?;
        communication.synchronize()?;
        let all = multiprocessors(context)?;
        // A multiprocessor holds 2048 threads: two of these blocks.
        let blocks = if options.fixed { all.saturating_sub(FREE).max(1) } else { 2 * all };
        let mut launch = compute.launch_builder(&await_word);
        launch.arg(&word).arg(&mut seen).arg(&LIMIT);
        // SAFETY: the kernel's parameters, in its order; both words stay until its stream has ended.
        unsafe {
            launch.launch(LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (1024, 1, 1), shared_mem_bytes: 0 })
        }?;
        println!("rank 1: a kernel of {blocks} blocks on {all} multiprocessors waits for the token");
        group.comm().send(&[1u8], 0)?;
        let address = word.device_ptr(&communication).0;
        // SAFETY: one word of this GPU, which stays until both streams have ended. The kernel reads it as volatile.
        let buffer = unsafe { BufferMut::from_address(&communication, DType::U32, address, 1) };
        let received = group.recv(buffer, 0);
        compute.synchronize()?;
        received?;
        let seen = compute.clone_dtoh(&seen)?;
        compute.synchronize()?;
        ensure!(seen == [TOKEN], "rank 1: the kernel saw {seen:?}, expected {TOKEN}");
        println!("rank 1: the kernel saw {TOKEN}");
        Ok(())
    })
}
