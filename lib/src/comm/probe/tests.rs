//! What does not need a peer: who measures with whom, orders, the clock.

use super::*;

#[test]
fn rank_0_measures_with_the_first_of_each_kind() {
    assert_eq!(Peers::of(&[0, 0, 0]), Peers { shm: Some(1), tcp: None });
    assert_eq!(Peers::of(&[0, 1, 2]), Peers { shm: None, tcp: Some(1) });
    let peers = Peers::of(&[0, 0, 2, 2]);
    assert_eq!([0, 1, 2, 3].map(|rank| peers.include(rank)), [false, true, true, false]);
}

#[test]
fn orders_travel() {
    for order in [
        Order::Stop,
        Order::Ping { rounds: ROUNDS, calls: 3 },
        Order::Exchange { bytes: 1 << 20, calls: 1 },
        Order::Prepare { bytes: LARGEST },
        Order::Copy { bytes: 8, calls: 2 },
    ] {
        assert_eq!(Order::decode(order.encode()), Some(order));
    }
    assert_eq!(Order::decode([9, 0, 0]), None);
    assert_eq!(Order::decode([3, u64::MAX, 0]), None);
}

#[test]
fn nothing_is_started_that_might_not_be_over_in_time() {
    let mut clock = Clock { end: Instant::now(), steady: true };
    let none = clock.sample(1.0, SAMPLES, LINK_SLICE, |_| panic!("there was no time"));
    assert_eq!(none.unwrap(), None);
    // An hour per call, as the first one says: no second one.
    let mut clock = Clock { end: Instant::now() + Duration::from_secs(60), steady: true };
    let mut calls = 0;
    let once = clock.sample(1.0, SAMPLES, LINK_SLICE, |n| {
        calls += n;
        Ok(vec![3.6e12; n])
    });
    assert_eq!((once.unwrap(), calls), (Some(3.6e12), 1));
}

#[test]
fn samples_are_bounded_in_number_and_the_cold_one_does_not_count() {
    let mut clock = Clock { end: Instant::now() + Duration::from_secs(3600), steady: true };
    let mut calls = 0;
    let median = clock.sample(1.0, SAMPLES, Duration::from_secs(3600), |n| {
        let times = (0..n).map(|i| if calls + i == 0 { 1e6 } else { 100.0 }).collect();
        calls += n;
        Ok(times)
    });
    assert_eq!((median.unwrap(), calls, clock.steady), (Some(100.0), SAMPLES, true));
    let mut turn = 0.0;
    let noisy = clock.sample(1.0, SAMPLES, Duration::from_secs(3600), |n| {
        let times = (0..n).map(|i| 2f64.powf(turn + i as f64)).collect();
        turn += n as f64;
        Ok(times)
    });
    assert!(noisy.is_ok() && !clock.steady);
}
