//! Collectives over links that take as long as a slow card.

use tinynccl::transport::paced;
use tinynccl::wire::Algorithm;
use tinynccl::{Comm, Config, ReduceOp};

#[test]
fn collectives_have_their_results_over_paced_links() {
    let mut config = Config::default();
    (config.algorithm, config.one_shot, config.stage) = (Some(Algorithm::Ring), 0, 0);
    let cards = paced::Cards::new(3, 1e9);
    let wrapped = move |rank, peer, pair| paced::wrap(pair, &cards, rank, peer);
    let comms = Comm::threads_with_links(3, config, wrapped).unwrap();
    std::thread::scope(|scope| {
        for comm in &comms {
            scope.spawn(move || {
                for count in [0, 1, 1000, 100_000] {
                    let mut data = vec![comm.rank() as f32; count];
                    comm.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
                    assert!(data.iter().all(|v| *v == 3.0), "{count}");
                }
            });
        }
    });
}
