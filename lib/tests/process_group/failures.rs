//! Calls that must fail, and the errors that they must give.

use tinynccl::process_group::{BackendType, Device, ProcessGroup};
use tinynccl::{Error, ReduceOp, Result};

use super::common::values::vector;
use super::place::Site;
use super::{ranks, threads};

/// The text of a failure; panics when it worked.
fn text<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => panic!("it worked, expected an error"),
        Err(e) => e.to_string(),
    }
}

/// Arguments that cannot be right fail at once, on the rank that gives them, and harm nothing.
pub(crate) fn wrong_arguments(group: &ProcessGroup, site: &Site) {
    let (rank, n) = (group.rank(), group.size());
    let put = |len: usize| site.put(vector::<f32>(len, |i| i as f32));
    let sum = ReduceOp::Sum;
    let e = text(group.broadcast_in_place(&mut put(4), n));
    assert!(e.contains(&format!("root is {n}, expected a rank below the world size {n}")), "{e}");
    let e = text(group.reduce_in_place_async(put(4), sum, n + 5));
    assert!(e.contains(&format!("root is {}", n + 5)), "{e}");
    let e = text(group.all_gather(&put(3), &mut put(3 * n + 1)));
    assert!(e.contains(&format!("rank {rank}: the output has {} elements, expected {n} ranks x 3", 3 * n + 1)), "{e}");
    let e = text(group.all_reduce(&put(3), &mut put(4), sum));
    assert!(e.contains("the input has 3 elements, the output 4"), "{e}");
    let other = site.put(vector::<f64>(3, |i| i as f64));
    let e = text(group.all_reduce(&other, &mut put(3), sum));
    assert!(e.contains("the input is of f64, the output of f32"), "{e}");
    let e = text(group.send(&put(1), rank));
    assert!(e.contains(&format!("rank {rank} cannot wait for itself")), "{e}");
    let e = text(group.recv_async(put(1), n));
    assert!(e.contains(&format!("peer is {n}")), "{e}");
    let (mine, mut theirs) = (put(2), put(3));
    let mut batch = group.batch();
    batch.send(&mine, rank).expect("to ourselves, in a batch");
    batch.recv(&mut theirs, rank).expect("from ourselves, in a batch");
    let e = text(batch.run());
    assert!(e.contains("sends 2 f32 to itself but receives 3 f32"), "{e}");
    let e = text(group.new_group(&[n]));
    assert!(e.contains(&format!("rank {n} of [{n}]")), "{e}");
    assert!(text(group.new_group(&[0, 0])).contains("rank 0 is twice"));
    if n > 1 {
        let e = text(group.new_group(&[rank]));
        assert!(e.contains("expected the same list on all ranks"), "{e}");
    }
    match (group.backend(), site) {
        (BackendType::Nccl, _) => {
            let e = text(group.all_reduce_in_place(&mut [1.0f32], sum));
            assert!(e.contains("all_reduce of host memory by backend nccl is not available"), "{e}");
        }
        (_, Site::Gpu(_)) => {
            let e = text(group.all_reduce(&put(1), &mut [0.0f32], sum));
            assert!(e.contains("the input is device memory, the output host memory"), "{e}");
        }
        _ => {}
    }
}

/// Ranks that make different calls: on backends that compare them, both are named.
pub(crate) fn mismatch(group: &ProcessGroup) {
    let rank = group.rank();
    let e = text(group.all_reduce_in_place(&mut vec![0.0f32; 10 + rank], ReduceOp::Sum));
    assert!(e.contains("disagree") || e.contains("aborted"), "{e}");
    // The group is over.
    let e = text(group.barrier());
    assert!(e.contains("aborted") || e.contains("disagree"), "{e}");
}

/// Two ranks that disagree about the length of a message.
pub(crate) fn message_mismatch(group: &ProcessGroup) {
    match group.rank() {
        // It may be in flight before the receiver looks at it.
        0 => drop(group.send(&[1.0f64; 5], 1)),
        1 => {
            let e = text(group.recv(&mut [0.0f64; 6], 0));
            assert!(e.contains("rank 1 and rank 0 disagree") && e.contains("count 5") && e.contains("count 6"), "{e}");
        }
        _ => {}
    }
}

#[test]
fn ranks_that_differ_are_named() {
    let told = threads(3, BackendType::Tinynccl, Device::None, |group| {
        let rank = group.rank();
        group.all_reduce_in_place(&mut vec![0.0f32; 10 + rank / 2], ReduceOp::Sum).expect_err("lengths differ")
    });
    let named = told.iter().filter(|e| matches!(e, Error::Mismatch { .. }));
    assert!(named.clone().count() >= 1, "{told:?}");
    for error in named {
        let text = error.to_string();
        assert!(text.contains("count 10") && text.contains("count 11"), "{text}");
    }
}

#[test]
fn a_group_that_one_rank_leaves_fails_on_the_others() {
    let told = threads(3, BackendType::Tinynccl, Device::None, |group| {
        if group.rank() == 1 {
            drop(group);
            return String::new();
        }
        text(group.all_reduce_in_place(&mut [1.0f32; 8], ReduceOp::Sum))
    });
    assert!(told[0].contains("rank 1") && told[2].contains("rank 1"), "{told:?}");
}

#[test]
fn abort_ends_calls_in_flight_and_later_ones() {
    let told = threads(2, BackendType::Tinynccl, Device::None, |group| {
        if group.rank() == 1 {
            group.abort("the test says so");
            return text(group.barrier());
        }
        // Never answered.
        let work =
            group.all_reduce_in_place_async(vec![1.0f32; 100], ReduceOp::Sum).and_then(|work| work.wait().map(drop));
        text(work)
    });
    assert!(told.iter().all(|e| e.contains("the test says so")), "{told:?}");
}

#[test]
fn ranks_that_ask_for_different_backends_are_told() {
    let comms = tinynccl::Comm::threads(2, super::config()).expect("threads");
    let told: Vec<String> = std::thread::scope(|scope| {
        let ranks: Vec<_> = comms
            .into_iter()
            .map(|comm| {
                let backend = if comm.rank() == 0 { BackendType::Auto } else { BackendType::Tinynccl };
                scope.spawn(move || text(ProcessGroup::new(comm, backend, Device::None)))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    });
    assert!(told.iter().all(|e| e.contains("rank 0 asks for backend auto, rank 1 for tinynccl")), "{told:?}");
}

/// Error of a backend that is not available: never another one instead.
#[test]
fn a_backend_that_is_missing_says_what_was_looked_for() {
    let alone = |backend| {
        let comm = tinynccl::Comm::threads(1, super::config()).expect("a thread").remove(0);
        ProcessGroup::new(comm, backend, Device::None)
    };
    if tinynccl::cuda::available().is_err() {
        let e = text(alone(BackendType::Nccl));
        // There may be a driver without a GPU.
        assert!(e.contains("rank 0") && (e.contains("libcuda.so.1") || e.contains("a GPU is not")), "{e}");
    }
    if !cfg!(feature = "mpi") {
        let e = text(alone(BackendType::Mpi));
        assert!(e.starts_with("backend mpi is not available here: rank 0") && e.contains("cargo feature `mpi`"), "{e}");
    }
    let group = alone(BackendType::Auto).expect("tinynccl needs nothing");
    assert_eq!(group.backend(), BackendType::Tinynccl);
    assert!(group.why().contains("host memory"), "{}", group.why());
}

/// Other libraries round every addition, and would not keep the promise.
#[test]
fn exact_sums_are_no_other_backends() {
    let config = super::config().with(|c| c.sum = tinynccl::config::Sums::Exact);
    let alone = |backend| {
        let comm = tinynccl::Comm::threads(1, config.clone()).expect("a thread").remove(0);
        ProcessGroup::new(comm, backend, Device::None)
    };
    let e = text(alone(BackendType::Mpi));
    assert!(e.contains("backend mpi") && e.contains("TINYNCCL_SUM=exact is kept by backend tinynccl alone"), "{e}");
    if tinynccl::cuda::available().is_ok() {
        let e = text(alone(BackendType::Nccl));
        assert!(e.contains("backend nccl") && e.contains("TINYNCCL_SUM=exact"), "{e}");
    }
    assert_eq!(alone(BackendType::Auto).expect("it keeps the promise").backend(), BackendType::Tinynccl);
}

/// A program that was not started by mpirun, but requests mpi.
#[test]
fn mpi_without_mpirun_says_so() {
    if !cfg!(feature = "mpi") {
        super::skip("backend mpi without mpirun", &"built without the feature mpi");
        return;
    }
    ranks::mpi_without_mpirun();
}
