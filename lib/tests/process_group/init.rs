//! Groups that are opened by address and by id.

use program_kit::port::Port;
use tinynccl::ReduceOp;
use tinynccl::bootstrap::Server;
use tinynccl::process_group::{BackendType, InitOptions, init_process_group};

use super::common::config;

fn together(options: impl Fn(usize) -> InitOptions + Sync) {
    let options = &options;
    std::thread::scope(|scope| {
        for rank in 0..3 {
            scope.spawn(move || {
                let group = init_process_group(BackendType::Auto, &options(rank).config(config())).expect("a group");
                assert_eq!((group.rank(), group.size(), group.global_ranks()), (rank, 3, &[0, 1, 2][..]));
                let mut sum = [rank as u32; 5];
                group.all_reduce_in_place(&mut sum, ReduceOp::Sum).expect("all_reduce");
                assert_eq!(sum, [3; 5]);
                group.close().expect("nothing has failed");
            });
        }
    });
}

#[test]
fn by_address() {
    let port = Port::loopback();
    together(|rank| InitOptions::address("127.0.0.1", port.at.port(), rank, 3));
}

#[test]
fn by_id() {
    let server = Server::start("127.0.0.1:0".parse().expect("an address"), 3, &config()).expect("a server");
    let id = server.unique_id();
    together(|rank| InitOptions::id(&id, rank, 3));
}
