//! The elements belong to the registered buffer: nobody else can free them, or grow them to another place.
fn run(comm: &tinynccl::Comm) -> tinynccl::Result<()> {
    let elements = vec![0f32; 1024];
    let buffer = comm.register_persistent(elements)?;
    drop(elements);
    comm.send(&buffer, 1)
}

fn main() {
    let _ = run;
}
