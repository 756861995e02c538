use super::*;
use crate::schedule::Partition;
use crate::simulate::Costs;
use crate::simulate::machine::LinkId;
use crate::simulate::system::{Fifo, Lengths, Link};

/// FIFOs over links of these bandwidths.
fn sharing(bandwidths: &[f64], fifos: &[(&[(u32, u32)], f64)]) -> Sharing {
    let links = bandwidths.iter().enumerate();
    let links = links.map(|(at, &bandwidth)| Link { id: LinkId { kind: 0, at: at as u32 }, bandwidth }).collect();
    let fifos =
        fifos.iter().map(|&(links, fastest)| Fifo { sender: (0, 0), latency: 0.0, links: links.to_vec(), fastest });
    let system = System {
        ranks: vec![],
        fifos: fifos.collect(),
        readers: vec![],
        links,
        windows: 1,
        parts: 1,
        partition: Partition::new(1, 1, 1, 1),
        lengths: Lengths::Exact,
        costs: Costs::default(),
        loads: vec![],
    };
    Sharing::new(&system)
}

/// Rates once every FIFO sends.
fn rates(sharing: &mut Sharing, fifos: u32) -> Vec<f64> {
    for fifo in 0..fifos {
        sharing.start(fifo, 1e9, 0.0);
    }
    sharing.share(0.0, |_, _, _| ());
    (0..fifos).map(|f| sharing.bundles[sharing.of[f as usize] as usize].rate).collect()
}

#[test]
fn what_one_cannot_use_the_others_get() {
    // The textbook's example: a slow link holds the first back, the second takes the rest of the fast one.
    let inf = f64::INFINITY;
    let mut three = sharing(&[2.0, 10.0], &[(&[(0, 1), (1, 1)], inf), (&[(0, 1)], inf), (&[(1, 1)], inf)]);
    assert_eq!(rates(&mut three, 3), [1.0, 1.0, 9.0]);
    let mut capped = sharing(&[10.0], &[(&[(0, 1)], 2.0), (&[(0, 1)], inf)]);
    // Equal links, other limits: these two are one bundle in name only.
    assert_eq!(capped.bundles.len(), 2);
    assert_eq!(rates(&mut capped, 2), [2.0, 8.0]);
    let mut counted = sharing(&[12.0], &[(&[(0, 3)], inf), (&[(0, 1)], 1.0)]);
    assert_eq!(rates(&mut counted, 2), [11.0 / 3.0, 1.0]);
}

proptest::proptest! {
    /// Max-min fairness by its definition: every transfer has a full link on which no transfer is faster.
    #[test]
    fn every_transfer_has_a_bottleneck(
        bandwidths in proptest::collection::vec(1.0f64..100.0, 1..6),
        routes in proptest::collection::vec(proptest::collection::btree_map(0u32..6, 1u32..4, 1..4), 1..12),
    ) {
        let links = bandwidths.len() as u32;
        let routes: Vec<Vec<(u32, u32)>> = routes
            .into_iter()
            .map(|r| r.into_iter().map(|(l, t)| (l % links, t)).collect::<std::collections::BTreeMap<_, _>>().into_iter().collect())
            .collect();
        let fifos: Vec<(&[(u32, u32)], f64)> = routes.iter().map(|r| (r.as_slice(), f64::INFINITY)).collect();
        let mut sharing = sharing(&bandwidths, &fifos);
        let rates = rates(&mut sharing, routes.len() as u32);
        let load = |link: u32| -> f64 {
            routes.iter().zip(&rates).map(|(r, &rate)| r.iter().filter(|l| l.0 == link).map(|l| f64::from(l.1) * rate).sum::<f64>()).sum()
        };
        for (link, &bandwidth) in bandwidths.iter().enumerate() {
            proptest::prop_assert!(load(link as u32) <= bandwidth * (1.0 + 1e-9));
        }
        for (route, &rate) in routes.iter().zip(&rates) {
            let bottleneck = route.iter().any(|&(link, _)| {
                let full = load(link) >= bandwidths[link as usize] * (1.0 - 1e-9);
                let fastest = routes.iter().zip(&rates).filter(|(r, _)| r.iter().any(|l| l.0 == link)).map(|(_, &x)| x).fold(0.0, f64::max);
                full && rate >= fastest * (1.0 - 1e-9)
            });
            proptest::prop_assert!(bottleneck, "{route:?} at {rate}: {rates:?}");
        }
    }
}
