//! An asynchronous call owns the buffer until it is done.
fn run(comm: &tinynccl::Comm) -> tinynccl::Result<()> {
    let mut buffer = comm.register_persistent(vec![0f32; 1024])?;
    let work = comm.all_reduce_async(buffer, tinynccl::ReduceOp::Sum)?;
    buffer[0] = 1.0;
    work.wait()?;
    Ok(())
}

fn main() {
    let _ = run;
}
