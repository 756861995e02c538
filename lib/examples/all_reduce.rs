//! Two ranks, each a process, add up what they have: `cargo run -p tinynccl --example all_reduce`.

use tinynccl::launch::{self, Launcher};
use tinynccl::{Comm, ReduceOp};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    if !launch::is_rank() {
        // Started by hand: run this program again, once per rank.
        std::process::exit(Launcher::new(2).run_self()?);
    }
    let comm = Comm::from_env()?;
    let mut gradient = vec![comm.rank() as f32; 1 << 20];
    comm.all_reduce_in_place(&mut gradient, ReduceOp::Avg)?;
    let work = comm.all_reduce_in_place_async(gradient, ReduceOp::Sum)?; // the buffer belongs to the call until it is done
    let gradient = work.wait()?;
    if comm.rank() == 0 {
        println!("{} ranks, {}", comm.size(), gradient[0]);
    }
    comm.close()?;
    Ok(())
}
