//! A kernel that holds a GPU: the status names the rank whose stream does not come to the call, and the record of each
//! rank shows how far its device is.

use std::path::Path;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use cudarc::driver::DevicePtr;
use tinynccl::comm::RawCall;
use tinynccl::config::StatusPlace;
use tinynccl::cuda::DeviceComm;
use tinynccl::status::record::{self, Stage};
use tinynccl::status::view::view;
use tinynccl::status::{Finding, ask, findings};
use tinynccl::wire::Collective;
use tinynccl::{Call, DType, ReduceOp};

use crate::common;
use crate::ranks::{contexts, in_threads};

/// The sentence about the communicator that has these words, or all sentences after a while.
fn finding(folder: &Path, words: &[&str]) -> Result<Finding, String> {
    let begin = Instant::now();
    loop {
        let answers = ask::all(&[folder.to_owned()], Duration::from_secs(20));
        let found = findings(&view(&answers), Duration::ZERO);
        if let Some(found) = found.iter().find(|found| words.iter().all(|words| found.text.contains(words))) {
            return Ok(found.clone());
        }
        if begin.elapsed() > Duration::from_secs(60) {
            return Err(format!("{found:#?}"));
        }
    }
}

#[test]
fn a_stream_that_does_not_come_to_the_call() {
    let Some(contexts) = contexts() else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut config = common::config();
    config.status = StatusPlace::Folder(folder.path().to_str().unwrap().to_owned());
    config.timeout = Duration::from_secs(600);
    let ranks = contexts.len();
    let (seen, last) = (Barrier::new(ranks), ranks - 1);
    in_threads(&contexts, config, |comm, context| {
        let rank = comm.rank();
        let device = DeviceComm::new(&comm, context).unwrap();
        let stream = context.new_stream().unwrap();
        let memory = stream.alloc_zeros::<f32>(100).unwrap();
        let at = memory.device_ptr(&stream).0;
        let all_reduce =
            RawCall::on_device(Call::new(Collective::AllReduce, DType::F32, ReduceOp::Sum, 0, 100), at, at);
        // SAFETY: the memory is as long, on this stream, and lives until the stream has run all.
        unsafe { device.enqueue(&stream, &all_reduce) }.unwrap();
        stream.synchronize().unwrap();
        let (release, held) = std::sync::mpsc::channel::<()>();
        if rank == last {
            // In the place of a kernel that does not end.
            stream.context().bind_to_thread().unwrap();
            // SAFETY: nothing is called on the device from within.
            unsafe {
                cudarc::driver::result::stream::launch_host_function(
                    stream.cu_stream(),
                    held_up,
                    Box::into_raw(Box::new(held)).cast(),
                )
            }
            .unwrap();
        }
        // SAFETY: as above.
        unsafe { device.enqueue(&stream, &all_reduce) }.unwrap();
        seen.wait();
        let into = folder.path().join("records");
        let seen_by_all = (rank == 0).then(|| {
            let sockets = folder.path().to_owned();
            let found =
                finding(&sockets, &["in all_reduce #2 (f32, sum, count 100)", "its last call was all_reduce #1"]);
            (found, ask::dump(&[sockets], &into, None, Duration::from_secs(20)))
        });
        seen.wait();
        drop(release);
        stream.synchronize().unwrap();
        let Some((found, files)) = seen_by_all else { return };
        let found = found.unwrap();
        assert_eq!(found.missing, [last], "{found:?}");
        println!("{}", found.text);
        assert_eq!(files.unwrap()[0].1.as_ref().unwrap().len(), ranks);
        for (_, record) in record::read(&into).unwrap() {
            let on_device = record.report.comms.iter().position(|comm| comm.device.is_some()).unwrap();
            let calls: Vec<_> = record.calls[on_device].iter().map(|call| (call.collective, call.state)).collect();
            let second = if record.rank == last { Stage::Enqueued } else { Stage::Begun };
            assert_eq!(calls, [(Some(1), Stage::Over), (Some(2), second)], "rank {}", record.rank);
        }
    });
}

/// Waits until the test lets the stream go on.
unsafe extern "C" fn held_up(held: *mut std::ffi::c_void) {
    // SAFETY: the box that the test gave away, once.
    let held: Box<std::sync::mpsc::Receiver<()>> = unsafe { Box::from_raw(held.cast()) };
    let _ = held.recv();
}
