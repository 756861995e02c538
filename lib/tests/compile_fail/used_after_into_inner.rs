//! The registration has ended: the handle is gone.
fn run(comm: &tinynccl::Comm) -> tinynccl::Result<()> {
    let buffer = comm.register_persistent(vec![0f32; 1024])?;
    let elements = buffer.into_inner();
    comm.send(&buffer, 1)?;
    drop(elements);
    Ok(())
}

fn main() {
    let _ = run;
}
