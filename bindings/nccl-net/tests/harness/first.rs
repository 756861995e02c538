//! The book's first plugin (`examples/first_plugin.rs`), driven by the table of version 8.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::ptr;

use libloading::Library;
use nccl_net_tinynccl::abi::Status;
use nccl_net_tinynccl::v8;

use crate::api::{Comm, Handle, is_pattern, pattern, until};

/// Requests that NCCL may have open on a connection.
const OPEN: usize = 32;

fn load() -> Library {
    let program = std::env::current_exe().expect("this program");
    let built = program.ancestors().nth(2).expect("the profile's folder").join("examples/libfirst_plugin.so");
    // SAFETY: it has no constructors.
    unsafe { Library::new(&built) }
        .unwrap_or_else(|e| panic!("{}: {e}; cargo build -p tinynccl-nccl-net --examples", built.display()))
}

fn ok(status: Status) {
    assert_eq!(status, Status::Success);
}

/// Done, and how long it was.
fn test(table: &v8::Table, request: Comm) -> Option<usize> {
    let (mut done, mut size) = (-1, -1);
    // SAFETY: of an open connection, and not done before.
    ok(unsafe { (table.test)(request, &mut done, &mut size) });
    (done == 1).then_some(size as usize)
}

fn pair(table: &v8::Table) -> [Comm; 2] {
    let mut handle: Handle = [0; 128];
    let (mut listener, mut send, mut recv, mut none) =
        (ptr::null_mut(), ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
    // SAFETY: as NCCL calls it.
    unsafe {
        ok((table.listen)(0, handle.as_mut_ptr().cast(), &mut listener));
        ok((table.accept)(listener, &mut recv, &mut none));
        assert!(recv.is_null(), "nobody has connected");
        until("the connection", || {
            ok((table.connect)(0, handle.as_mut_ptr().cast(), &mut send, &mut none));
            (!send.is_null()).then_some(())
        });
        until("the caller", || {
            ok((table.accept)(listener, &mut recv, &mut none));
            (!recv.is_null()).then_some(())
        });
        ok((table.close_listen)(listener));
    }
    [send, recv]
}

#[test]
fn the_books_first_plugin_moves_every_byte() {
    let library = load();
    // SAFETY: a table of this type, which lives as long as the library.
    let table: &v8::Table = unsafe { &**library.get::<*const v8::Table>("ncclNetPlugin_v8").expect("the table") };
    let [send, recv] = pair(table);
    let sizes: Vec<usize> = (0..200).map(|i| [0, 1, 9, 4096, 70_001, 3 << 20][i % 6]).collect();
    let sent: Vec<Vec<u8>> = sizes.iter().enumerate().map(|(i, len)| pattern(*len, i)).collect();
    let mut room = vec![vec![0; 4 << 20]; OPEN];
    let (mut sends, mut recvs): (VecDeque<Comm>, VecDeque<Comm>) = Default::default();
    let (mut begun, mut posted, mut arrived) = (0, 0, 0);
    until("all messages", || {
        while begun < sent.len() && sends.len() < OPEN {
            let (data, mut request) = (&sent[begun], ptr::null_mut());
            let at = data.as_ptr().cast_mut().cast();
            // SAFETY: the data lives until all are done.
            ok(unsafe { (table.isend)(send, at, data.len() as c_int, 0, ptr::null_mut(), &mut request) });
            sends.push_back(request);
            begun += 1;
        }
        while posted < sent.len() && recvs.len() < OPEN {
            let place = &mut room[posted % OPEN];
            let (mut at, mut len) = (place.as_mut_ptr().cast(), place.len() as c_int);
            let (mut tag, mut handle, mut request) = (0, ptr::null_mut(), ptr::null_mut());
            // SAFETY: a buffer has one receive at a time.
            ok(unsafe { (table.irecv)(recv, 1, &mut at, &mut len, &mut tag, &mut handle, &mut request) });
            recvs.push_back(request);
            posted += 1;
        }
        // The last one first, which moves those before it.
        if let Some(last) = sends.pop_back().filter(|last| test(table, *last).is_none()) {
            sends.push_back(last);
        }
        if let Some(len) = recvs.front().and_then(|first| test(table, *first)) {
            recvs.pop_front();
            assert_eq!(len, sizes[arrived]);
            assert!(is_pattern(&room[arrived % OPEN][..len], arrived), "message {arrived}");
            arrived += 1;
        }
        (arrived == sent.len() && sends.is_empty()).then_some(())
    });
    // SAFETY: closed with a request open; the buffer is written no more.
    unsafe {
        let (mut at, mut len) = (room[0].as_mut_ptr().cast(), 8);
        let (mut tag, mut handle, mut request) = (0, ptr::null_mut(), ptr::null_mut());
        ok((table.irecv)(recv, 1, &mut at, &mut len, &mut tag, &mut handle, &mut request));
        ok((table.close_send)(send));
        // A process that another test starts has a copy of the socket until it executes its program.
        let test = || Some((table.test)(request, &mut 0, ptr::null_mut())).filter(|status| *status != Status::Success);
        assert_eq!(until("the end of the connection", test), Status::SystemError);
        ok((table.close_recv)(recv));
    }
}
