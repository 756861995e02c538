//! The labs, one file each.

mod dead_rank;
mod flapping_rail;
mod gpu_counts;
mod gpu_dead_rank;
mod gpu_full;
mod gpu_stream;
mod gpu_wrong_interface;
mod kill_any_rank;
mod lossy_link;
mod mismatched_counts;
mod missing_group;
mod missing_group_start;
mod order;
mod rdma;
mod shm_full;
mod slow_gpu;
mod slow_link;
mod stopped_rank;
mod sum_order;
mod wrong_gid;
mod wrong_icrc;
mod wrong_interface;

use anyhow::Result;
use clap::Subcommand;

use crate::gpu;

/// A lab; `--fixed` runs the mended version.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum Lab {
    /// Three ranks gather their predictions; one has fewer than the others.
    MismatchedCounts(Fixed),
    /// Two ranks use two communicators in different orders.
    Order(Fixed),
    /// One of three ranks is killed.
    DeadRank(Fixed),
    /// One of three ranks is stopped, and does not die.
    StoppedRank(Fixed),
    /// Two ranks send to each other before they receive.
    MissingGroup(missing_group::Options),
    /// Two ranks share a file of a /dev/shm that is too small.
    ShmFull(shm_full::Options),
    /// Two hosts, and an interface that does not lead from one to the other.
    WrongInterface(Fixed),
    /// Four ranks in a ring, one link of which is slow.
    SlowLink(Fixed),
    /// Gradients are summed in bf16 by different algorithms, or your own numbers in f32.
    SumOrder(sum_order::Options),
    /// A page is sent over RDMA, freed, taken again at the same address, and sent again.
    StaleRegistration(Fixed),
    /// Two ranks over RDMA, and a GID index that was right elsewhere.
    WrongGid(Fixed),
    /// A sender over RDMA that is faster than its receiver.
    RnrStorm(Fixed),
    /// A message crosses a box that translates addresses, and no acknowledgement comes.
    WrongIcrc(Fixed),
    /// WRITEs over a link that loses packets.
    LossyLink(lossy_link::Options),
    /// Two GPUs, and buffers of different lengths.
    GpuCounts(gpu::Options),
    /// Two GPUs; gradients are computed in one stream and summed in another.
    GpuStream(gpu::Options),
    /// Two GPUs, one of which is full of a kernel that waits for a message.
    GpuFull(gpu::Options),
    /// Messages over two rails, one of which goes away for a moment now and then.
    FlappingRail(flapping_rail::Options),
    /// Two GPUs train in step; one of them has another job as well.
    SlowGpu(slow_gpu::Options),
    /// Two GPUs send to each other before they receive.
    MissingGroupStart(missing_group_start::Options),
    /// One of two ranks is killed while the other one's GPU waits for it.
    GpuDeadRank(gpu::Options),
    /// Two GPUs, and a variable that names an interface which this host does not have.
    GpuWrongInterface(gpu::Options),
    /// Four ranks and two spares train; processes of your choice are killed.
    KillAnyRank(kill_any_rank::Options),
}

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Fixed {
    /// Run the mended version.
    #[arg(long)]
    pub(crate) fixed: bool,
}

impl Lab {
    pub(crate) fn run(&self) -> Result<u8> {
        match self {
            Lab::MismatchedCounts(options) => mismatched_counts::run(options.fixed),
            Lab::Order(options) => order::run(options.fixed),
            Lab::DeadRank(options) => dead_rank::run(options.fixed),
            Lab::StoppedRank(options) => stopped_rank::run(options.fixed),
            Lab::MissingGroup(options) => missing_group::run(options),
            Lab::ShmFull(options) => shm_full::run(options),
            Lab::WrongInterface(options) => wrong_interface::run(options.fixed),
            Lab::SlowLink(options) => slow_link::run(options.fixed),
            Lab::SumOrder(options) => sum_order::run(options),
            Lab::WrongGid(options) => wrong_gid::run(options.fixed),
            Lab::WrongIcrc(options) => wrong_icrc::run(options.fixed),
            Lab::LossyLink(options) => lossy_link::run(options),
            Lab::GpuCounts(options) => gpu_counts::run(options),
            Lab::GpuStream(options) => gpu_stream::run(options),
            Lab::GpuFull(options) => gpu_full::run(options),
            Lab::FlappingRail(options) => flapping_rail::run(options),
            Lab::SlowGpu(options) => slow_gpu::run(options),
            Lab::MissingGroupStart(options) => missing_group_start::run(options),
            Lab::GpuDeadRank(options) => gpu_dead_rank::run(options),
            Lab::GpuWrongInterface(options) => gpu_wrong_interface::run(options),
            Lab::KillAnyRank(options) => kill_any_rank::run(options),
            Lab::StaleRegistration(options) => rdma::stale_registration::run(options.fixed),
            Lab::RnrStorm(options) => rdma::rnr_storm::run(options.fixed),
        }
    }
}
