//! Ranks that disagree, that do not come, that give up, and calls that cannot be made.

use std::time::Duration;

use tinynccl::cuda::{DeviceComm, Path};
use tinynccl::{Error, ReduceOp};

use super::{PATIENCE, Rank, ranks};

#[test]
fn ranks_that_disagree_are_told_so() {
    let Some(ranks) = ranks(PATIENCE) else { return };
    let mut buffers: Vec<_> = ranks.iter().map(|r| r.stream.alloc_zeros::<f32>(8).unwrap()).collect();
    for (rank, (r, buffer)) in ranks.iter().zip(&mut buffers).enumerate() {
        let len = if rank == 1 { 5 } else { 6 };
        r.comm.all_reduce_in_place(&r.stream, &mut buffer.slice_mut(..len), ReduceOp::Sum).unwrap();
    }
    let error = ranks[0].comm.synchronize().unwrap_err().to_string();
    if ranks[0].comm.path() == Path::Hosted {
        assert!(error.contains("f32, sum, count 6") && error.contains("f32, sum, count 5"), "{error}");
    } else {
        assert!(error.contains("all_reduce of 6 f32, sum") && error.contains("all_reduce of 5 f32, sum"), "{error}");
    }
    // Through the host either rank may be the one that finds out.
    let found = ["rank 0 and rank 1 disagree", "rank 1 and rank 0 disagree"];
    assert!(found.iter().any(|words| error.contains(words)), "{error}");
    let later = ranks[0].comm.all_reduce_in_place(&ranks[0].stream, &mut buffers[0], ReduceOp::Sum);
    assert!(later.is_err());
}

#[test]
fn a_rank_that_does_not_come_is_named_within_the_deadline() {
    for len in [8, 4_000_000] {
        // A failed communicator stays so: one for each size.
        let Some(ranks) = ranks(Duration::from_millis(300)) else { return };
        let mut buffer = ranks[0].stream.alloc_zeros::<f32>(len).unwrap();
        ranks[0].comm.all_reduce_in_place(&ranks[0].stream, &mut buffer, ReduceOp::Sum).unwrap();
        named(&ranks[0].comm);
        // The call is over for its buffer, too, in the order of the stream.
        let stream = ranks[0].stream.clone();
        drop(buffer);
        drop(ranks);
        stream.synchronize().unwrap();
        stream.context().synchronize().unwrap();
    }
}

/// Rank 0 alone made the call: any of the others is missing, but it sees only those whose messages it waits for.
fn named(comm: &DeviceComm) {
    match comm.synchronize().unwrap_err() {
        Error::Timeout { rank: 0, missing, op, .. } => {
            assert!(!missing.is_empty() && missing.iter().all(|peer| (1..comm.size()).contains(peer)), "{missing:?}");
            assert!(op.starts_with("all_reduce"), "{op}");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn abort_ends_a_wait() {
    let Some(ranks) = ranks(Duration::from_secs(600)) else { return };
    let mut buffer = ranks[0].stream.alloc_zeros::<f32>(1000).unwrap();
    ranks[0].comm.all_reduce_in_place(&ranks[0].stream, &mut buffer, ReduceOp::Sum).unwrap();
    ranks[0].comm.abort();
    assert!(matches!(ranks[0].comm.synchronize(), Err(Error::Aborted { rank: 0, .. })));
}

#[test]
fn wrong_lengths_roots_and_peers_are_refused() {
    let Some(ranks) = ranks(PATIENCE) else { return };
    let Rank { comm, stream } = &ranks[0];
    let n = comm.size();
    let input = stream.alloc_zeros::<f32>(10).unwrap();
    let mut output = stream.alloc_zeros::<f32>(11).unwrap();
    for error in [
        comm.all_reduce(stream, &input, &mut output, ReduceOp::Sum).unwrap_err(),
        comm.all_gather(stream, &input, &mut output).unwrap_err(),
        comm.broadcast_in_place(stream, &mut output, n).unwrap_err(),
        comm.send(stream, &input, 0).unwrap_err(),
        comm.recv(stream, &mut output, n).unwrap_err(),
    ] {
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    }
    let other = &ranks[1];
    if other.stream.context() != comm.context() {
        let error = comm.broadcast_in_place(&other.stream, &mut output, 0).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    }
    comm.check().unwrap();
}
