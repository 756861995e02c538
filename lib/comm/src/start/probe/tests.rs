//! The parts that need no peer: the choice of measuring ranks, orders, the clock.

use super::*;
use tinynccl_transport::relay::Routes;

#[test]
fn rank_0_measures_with_the_first_of_each_kind() {
    let direct = Relays::default();
    assert_eq!(Peers::of(&[0, 0, 0], &direct), Peers { shm: Some(1), tcp: None });
    assert_eq!(Peers::of(&[0, 1, 2], &direct), Peers { shm: None, tcp: Some(1) });
    let peers = Peers::of(&[0, 0, 2, 2], &direct);
    assert_eq!([0, 1, 2, 3].map(|rank| peers.include(rank)), [false, true, true, false]);
}

#[test]
fn a_peer_behind_a_relay_is_passed_over() {
    // 0 - 2 - 1: what is measured with rank 1 would be two hops.
    let routes = Routes::new(3, |a, b| (a, b) != (0, 1));
    let relays = Relays::new(&routes.paths(), &[0, 1, 2]);
    assert_eq!(Peers::of(&[0, 1, 2], &relays), Peers { shm: None, tcp: Some(2) });
}

#[test]
fn orders_travel() {
    for order in [
        Order::Stop,
        Order::Ping { rounds: ROUNDS, calls: 3 },
        Order::Exchange { bytes: 1 << 20, calls: 1 },
        Order::Prepare { bytes: LARGEST },
        Order::Copy { bytes: 8, calls: 2 },
        Order::ZeroCopy { from: usize::MAX },
    ] {
        assert_eq!(Order::decode(order.encode()), Some(order));
    }
    assert_eq!(Order::decode([9, 0, 0]), None);
    assert_eq!(Order::decode([3, u64::MAX, 0]), None);
}
