//! Files that are wrong, and what is said of them.

use super::by_hand::{SIGNAL, WAIT, algo, all_pairs, op, plan, ring, step, tb};
use crate::schedule::Schedule;

fn msccl(text: &str) -> String {
    Schedule::from_msccl(text).map(|schedule| schedule.to_string()).unwrap_err().to_string()
}

fn mscclpp(text: &str) -> String {
    Schedule::from_mscclpp(text).map(|schedule| schedule.to_string()).unwrap_err().to_string()
}

/// The first `from` behind `mark` becomes `to`.
fn changed(text: &str, mark: &str, from: &str, to: &str) -> String {
    let (before, behind) = text.split_at(text.find(mark).unwrap());
    assert!(behind.contains(from), "{from}");
    before.to_owned() + &behind.replacen(from, to, 1)
}

#[test]
fn text_that_is_no_such_file() {
    for (text, words) in [
        ("", "MSCCL: no XML"),
        ("<algo", "MSCCL: no XML"),
        ("<system/>", "line 1: <system>: expected <algo>, got <system>"),
        ("<algo coll=\"custom\"/>", "the collective is \"custom\", of which no result is known; expected allreduce, "),
        ("<algo coll=\"allreduce\"/>", "the attribute ngpus is missing"),
        ("<algo coll=\"allreduce\" ngpus=\"x\"/>", "ngpus is \"x\", expected a number from 1 to 65536"),
    ] {
        assert!(msccl(text).contains(words), "{text}: {}", msccl(text));
    }
    for (text, words) in [
        ("", "mscclpp: no execution plan"),
        ("{\"collective\":\"allreduce\"}", "missing field `gpus`"),
        ("{\"collective\":\"sendrecv\",\"gpus\":[]}", "the collective is \"sendrecv\", of which no result is known"),
        ("{\"collective\":\"allreduce\",\"gpus\":[]}", "expected 1 to 65536 gpus, got 0"),
    ] {
        assert!(mscclpp(text).contains(words), "{text}: {}", mscclpp(text));
    }
}

#[test]
fn structure_that_is_wrong_is_named_with_its_line() {
    let ring = ring(3);
    for (text, words) in [
        (ring.replace("ngpus=\"3\"", "ngpus=\"4\""), "nchunksperloop is 3, expected a multiple of 4"),
        (ring.replace("<gpu id=\"2\"", "<gpu id=\"1\""), "line 16: <gpu>: a second gpu with id 1"),
        (ring.replace("<tb id=\"0\"", "<tb id=\"0\" send=\"7\""), "no XML"),
        (changed(&ring, "<gpu id=\"1\"", "send=\"2\"", "send=\"1\""), "line 10: <tb>: send is 1, the rank itself"),
        (changed(&ring, "<gpu id=\"1\"", "send=\"2\"", "send=\"3\""), "send is \"3\", expected a number from -1 to 2"),
        (changed(&ring, "<gpu id=\"1\"", "send=\"2\"", "send=\"-1\""), "line 11: <step>: the threadblock has no send"),
        (changed(&ring, "<gpu id=\"1\"", "type=\"s\"", "type=\"x\""), "type is \"x\", expected s, r, rcs"),
        (changed(&ring, "<gpu id=\"1\"", "s=\"1\"", "s=\"0\""), "s is 0, expected more than the step before"),
        (
            changed(&ring, "<gpu id=\"1\"", "depid=\"-1\" deps=\"-1\"", "depid=\"4\" deps=\"0\""),
            "waits for step 0 of threadblock 4, which rank 1 does not have",
        ),
        (
            changed(&ring, "<gpu id=\"1\"", "srcoff=\"1\"", "srcoff=\"3\""),
            "rank 1, threadblock 0, step 0 (s): chunk 3 of the output buffer: the buffer has 3",
        ),
    ] {
        assert!(msccl(&text).contains(words), "{words}: {}", msccl(&text));
    }
}

#[test]
fn a_receive_that_is_missing() {
    let last = step(2, "r", ("o", 2), ("o", 2), 1, None);
    let text = ring(3);
    assert!(text.contains(&last));
    let said = msccl(&text.replacen(&last, "", 1));
    assert!(said.contains("1 message(s) of rank 0, threadblock 0, are not received by rank 1"), "{said}");
    // Not even a threadblock.
    let zero = tb(0, 1, -1, 0, &step(0, "s", ("i", 0), ("o", 0), 1, None));
    let said = msccl(&algo("broadcast", 1, true, 0, &[zero, String::new()]));
    assert!(said.contains("channel 0, rank 0 to rank 1: no threadblock of rank 1 receives there"), "{said}");
}

#[test]
fn a_send_that_is_missing() {
    let first = step(0, "s", ("o", 1), ("o", 1), 1, None);
    let said = msccl(&ring(3).replacen(&first, "", 1));
    assert!(said.starts_with("MSCCL: deadlock: rank ") && said.contains("waits for a message from rank 1"), "{said}");
}

#[test]
fn a_chunk_that_two_threadblocks_write() {
    let text = changed(&all_pairs(), "<tb id=\"1\"", "dstbuf=\"s\" dstoff=\"1\"", "dstbuf=\"s\" dstoff=\"0\"");
    let said = msccl(&text);
    let words = "writes chunk 0 of the scratch buffer, and nothing orders that with what threadblock 0 does to it";
    assert!(said.contains("rank 0, threadblock 1, step 1 (r): ") && said.contains(words), "{said}");
}

#[test]
fn a_dependency_that_is_missing() {
    let text = all_pairs().replacen("depid=\"1\" deps=\"1\"", "depid=\"-1\" deps=\"-1\"", 1);
    let said = msccl(&text);
    assert!(said.contains("rank 0, threadblock 2, step 3 (re): reads chunk 1 of the scratch buffer"), "{said}");
}

#[test]
fn dependencies_in_a_circle() {
    let text = all_pairs();
    let sum = "<step s=\"0\" type=\"cpy\"";
    let said = msccl(&changed(&text, sum, "depid=\"-1\" deps=\"-1\"", "depid=\"0\" deps=\"2\""));
    let words = "rank 0, threadblock 0, step 2 (s) waits for threadblock 2, step 3";
    assert!(said.starts_with("MSCCL: deadlock: ") && said.contains(words), "{said}");
    assert!(said.contains("rank 0, threadblock 2, step 0 (cpy) waits for threadblock 0, step 2"), "{said}");
    let said = msccl(&changed(&text, sum, "depid=\"-1\" deps=\"-1\"", "depid=\"2\" deps=\"1\""));
    assert!(said.contains("waits for a later step of its own threadblock"), "{said}");
}

#[test]
fn an_input_that_is_added_twice_and_parts_that_do_not_belong_together() {
    let twice = all_pairs().replacen(
        &step(3, "re", ("s", 1), ("o", 0), 1, None),
        &step(3, "re", ("s", 0), ("o", 0), 1, None),
        1,
    );
    let said = msccl(&twice);
    assert!(said.contains("step 3 (re): combines the input of rank 1 twice: ranks 0, 1 and rank 1"), "{said}");
    let other = changed(&all_pairs(), "<gpu id=\"1\"", "srcbuf=\"i\" srcoff=\"0\"", "srcbuf=\"i\" srcoff=\"1\"");
    let said = msccl(&other);
    assert!(said.contains("combines part 0 of segment 0 of rank 0 with part 1 of segment 0 of rank 1"), "{said}");
}

#[test]
fn two_threadblocks_at_one_end_of_a_link() {
    let text = changed(&all_pairs(), "<tb id=\"1\"", "send=\"2\" recv=\"2\"", "send=\"1\" recv=\"2\"");
    let said = msccl(&text);
    assert!(said.contains("rank 0: threadblocks 0 and 1 both send with rank 1 on channel 0"), "{said}");
}

#[test]
fn messages_of_other_lengths() {
    let gpu = |rank: i32, cnt: u32| {
        let steps = step(0, "s", ("i", 0), ("s", 0), 2, None) + &step(1, "rrc", ("i", 0), ("o", 0), cnt, None);
        tb(0, 1 - rank, 1 - rank, 0, &steps)
    };
    let said = msccl(&algo("allreduce", 2, false, 0, &[gpu(0, 2), gpu(1, 1)]));
    assert!(said.contains("rank 1, threadblock 0, step 1 (rrc): expects 1 chunks, the message has 2"), "{said}");
}

/// Ranks that add in another order than each other have results that differ in their last bits.
#[test]
fn sums_in_several_orders() {
    let gpu = |rank: i32| {
        let mut tbs = String::new();
        let mut sum = step(0, "cpy", ("i", 0), ("o", 0), 1, None);
        for (at, peer) in (0..3).filter(|peer| *peer != rank).enumerate() {
            let steps = step(0, "s", ("i", 0), ("s", 0), 1, None) + &step(1, "r", ("i", 0), ("s", at as i32), 1, None);
            tbs += &tb(at as u32, peer, peer, 0, &steps);
            sum += &step(at as u32 + 1, "re", ("s", at as i32), ("o", 0), 1, Some((at as u32, 1)));
        }
        tbs + &tb(2, -1, -1, 0, &sum)
    };
    let said = msccl(&algo("allreduce", 1, false, 2, &[gpu(0), gpu(1), gpu(2)]));
    assert!(said.contains("rank 0 computes (rank 2 + (rank 0 + rank 1)), rank 2 computes"), "{said}");
}

#[test]
fn a_result_that_is_missing() {
    // Out of place nothing puts a rank's own part into its output.
    let mut text = ring(3).replace("inplace=\"1\"", "inplace=\"0\"");
    for rank in 0..3 {
        let first = step(0, "s", ("o", rank), ("o", rank), 1, None);
        text = text.replace(&first, &step(0, "s", ("i", 0), ("o", rank), 1, None));
    }
    let said = msccl(&text);
    let words = "rank 0, out[0.0], window 0: expected in[0.0] of window 0 of rank 0, got nothing";
    assert!(said.contains(words), "{said}");
}

#[test]
fn operations_that_no_message_expresses() {
    let store = op("gstore", &["i0"], &["i0"]);
    let said = mscclpp(&plan("allreduce", (1, 1), 0, [&[&store], &[&store]]));
    assert!(
        said.contains("rank 0, threadblock 0, operation 0 (gstore): a switch combines or multiplies the data"),
        "{said}"
    );
    let other = op("teleport", &["i0"], &["i0"]);
    let said = mscclpp(&plan("allreduce", (1, 1), 0, [&[&other], &[&other]]));
    assert!(said.contains("operation 0 (teleport): no such operation is known"), "{said}");
}

#[test]
fn data_that_no_wait_makes_known() {
    let put = op("put", &["i0"], &["S0"]);
    let add = op("re", &["i0", "s0"], &["i0"]);
    let of = |ops: &[&str]| {
        let ops = ops.join(",");
        mscclpp(&plan("allreduce", (1, 1), 1, [&[&ops], &[&ops]]))
    };
    let said = of(&[&put, SIGNAL, &add, WAIT]);
    let words = "operation 2 (re): reads chunk 0 of the scratch buffer, where rank 1, threadblock 0, puts data";
    assert!(said.contains(words), "{said}");
    let said = of(&[&put, SIGNAL]);
    assert!(said.contains("(put): writes chunk 0 of the scratch buffer of rank 1, which never waits"), "{said}");
    let said = of(&[WAIT, &put, SIGNAL, &add]);
    assert!(said.contains("deadlock: rank 0, threadblock 0, operation 0 (wait) waits for a signal"), "{said}");
    let said = of(&[&op("get", &["I0"], &["s0"]), &add]);
    assert!(said.contains("(get): reads chunk 0 of the input buffer of rank 1 before a signal of that rank"), "{said}");
    // It changes what the other may still read.
    let rlx = [SIGNAL.replace("signal", "rlxsignal"), WAIT.replace("wait", "rlxwait")];
    let said = of(&[&rlx[0], &rlx[1], &op("rre", &["i0", "I0"], &["i0"])]);
    assert!(said.contains("(rre): ") && said.contains("nothing orders that with rank"), "{said}");
}

#[test]
fn buffers_and_channels_that_are_not_there() {
    let of = |op: &str| mscclpp(&plan("allreduce", (1, 1), 1, [&[op], &[op]]));
    for (op, words) in [
        (op("copy", &["i1"], &["s0"]), "chunk 1 of the input buffer of rank 0: there are 1"),
        (op("copy", &["x0"], &["s0"]), "the buffer is \"x\", expected i, o or s"),
        (op("copy", &["i0+1"], &["s0+2"]), "works on buffers of 1 and of 2 chunks"),
        (op("put", &["i0"], &["S0"]).replace("\"buffer_id\":1", "\"buffer_id\":2"), "remote buffer 2 of type memory"),
        (SIGNAL.replace("[0]", "[1]"), "channel 1 of type memory is not there"),
        (SIGNAL.replace("memory", "port"), "channel 0 of type port is not there"),
        ("{\"name\":\"sem_acquire\",\"semaphore_ids\":[3]}".to_owned(), "semaphore 3 of 1"),
        ("{\"name\":\"barrier\"}".to_owned(), "expected barrier_id and num_threadblocks"),
        (op("copy", &["i0"], &[]), "1 sources and 0 targets"),
    ] {
        let said = of(&op);
        assert!(said.contains("rank 0, threadblock 0, operation 0 (") && said.contains(words), "{op}: {said}");
    }
}
