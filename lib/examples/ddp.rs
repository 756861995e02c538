//! A step of data parallelism: gradients are averaged over two ranks in buckets, while backward goes on with the next
//! ones. `cargo run -p tinynccl --example ddp`

use tinynccl::ddp::{Ddp, DdpOptions, ParamSpec};
use tinynccl::launch::{self, Launcher};
use tinynccl::process_group::{BackendType, InitOptions, init_process_group};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    if !launch::is_rank() {
        std::process::exit(Launcher::new(2).run_self()?);
    }
    let group = init_process_group(BackendType::Auto, &InitOptions::from_env())?;
    let params = [4096, 512].map(|len| ParamSpec { name: format!("{len} weights"), len });
    let mut ddp = Ddp::new(&group, &params, DdpOptions::default())?;
    ddp.zero();
    // Backward gives the last layer's gradients first.
    for index in [1, 0] {
        ddp.gradient_mut(index)?.fill(group.rank() as f32);
        ddp.ready(index)?;
    }
    ddp.finish()?;
    println!("rank {}: the mean gradient is {}", group.rank(), ddp.gradient(0)?[0]);
    group.close()?;
    Ok(())
}
