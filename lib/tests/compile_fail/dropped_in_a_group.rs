//! A call of a group has not run before the group ends, so the buffer must live until then.
fn run(comm: &tinynccl::Comm) -> tinynccl::Result<()> {
    comm.group(|group| {
        let buffer = comm.register_persistent(vec![0f32; 1024])?;
        group.send(&buffer, 1)
    })
}

fn main() {
    let _ = run;
}
