//! Milestone 07: ring all-reduce over TCP.

use std::process::ExitCode;

use allreduce_tcp::{Count, Over};
use tinynccl::config::TransportChoice;

fn main() -> ExitCode {
    allreduce_tcp::main(&Over {
        program: env!("CARGO_PKG_NAME"),
        transport: TransportChoice::Tcp,
        name: "TCP",
        counted: ["counted", "by the kernel's loopback counter"],
        count: Count::Machine(allreduce_tcp::loopback_bytes),
        prepare: |_| Ok(None),
    })
}
