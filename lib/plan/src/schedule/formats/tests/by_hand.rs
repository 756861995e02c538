//! Files by hand, of each operation that a format has.

use std::fmt::Write as _;

use super::played::played;
use crate::schedule::Schedule;
use crate::schedule::draw::draw_all;
use crate::wire::Collective;

/// A step of MSCCL in a line: number, type, source, target, chunks, and what it waits for.
pub(super) fn step(
    s: u32,
    kind: &str,
    src: (&str, i32),
    dst: (&str, i32),
    cnt: u32,
    wait: Option<(u32, u32)>,
) -> String {
    let (depid, deps) = wait.map_or((-1, -1), |(id, step)| (i64::from(id), i64::from(step)));
    format!(
        "<step s=\"{s}\" type=\"{kind}\" srcbuf=\"{}\" srcoff=\"{}\" dstbuf=\"{}\" dstoff=\"{}\" cnt=\"{cnt}\" \
         depid=\"{depid}\" deps=\"{deps}\" hasdep=\"0\"/>\n",
        src.0, src.1, dst.0, dst.1
    )
}

pub(super) fn tb(id: u32, send: i32, recv: i32, chan: u32, steps: &str) -> String {
    format!("<tb id=\"{id}\" send=\"{send}\" recv=\"{recv}\" chan=\"{chan}\">\n{steps}</tb>\n")
}

pub(super) fn algo(coll: &str, chunks: usize, in_place: bool, scratch: usize, gpus: &[String]) -> String {
    let mut text = format!(
        "<algo name=\"test\" proto=\"LL\" nchannels=\"1\" nchunksperloop=\"{chunks}\" ngpus=\"{}\" coll=\"{coll}\" \
         inplace=\"{}\">\n",
        gpus.len(),
        u8::from(in_place)
    );
    for (id, tbs) in gpus.iter().enumerate() {
        let _ = write!(text, "<gpu id=\"{id}\" i_chunks=\"0\" o_chunks=\"0\" s_chunks=\"{scratch}\">\n{tbs}</gpu>\n");
    }
    text + "</algo>"
}

/// A ring all_gather in place: each rank's own part is where it belongs.
pub(super) fn ring(ranks: i32) -> String {
    let gpu = |rank: i32| {
        let before = |hops: i32| (rank + hops * (ranks - 1)) % ranks;
        let mut steps = step(0, "s", ("o", rank), ("o", rank), 1, None);
        for hop in 1..ranks {
            let chunk = ("o", before(hop));
            let kind = if hop + 1 < ranks { "rcs" } else { "r" };
            steps += &step(hop as u32, kind, chunk, chunk, 1, None);
        }
        tb(0, (rank + 1) % ranks, before(1), 0, &steps)
    };
    algo("allgather", ranks as usize, true, 0, &(0..ranks).map(gpu).collect::<Vec<_>>())
}

/// All ranks send each other their parts, one threadblock per peer; another threadblock adds, when both have come.
pub(super) fn all_pairs() -> String {
    let gpu = |rank: i32| {
        let peers: Vec<i32> = (0..3).filter(|peer| *peer != rank).collect();
        let mut tbs = String::new();
        for (at, &peer) in peers.iter().enumerate() {
            let steps = step(0, "s", ("i", peer), ("s", 0), 1, None)
                + &step(1, "r", ("i", rank), ("s", at as i32), 1, None)
                + &step(2, "s", ("o", rank), ("o", rank), 1, Some((2, 3)))
                + &step(3, "r", ("o", peer), ("o", peer), 1, None);
            tbs += &tb(at as u32, peer, peer, 0, &steps);
        }
        let steps = step(0, "cpy", ("i", rank), ("o", rank), 1, None)
            + &step(1, "nop", ("i", -1), ("o", -1), 0, Some((0, 1)))
            + &step(2, "re", ("s", 0), ("o", rank), 1, Some((1, 1)))
            + &step(3, "re", ("s", 1), ("o", rank), 1, None);
        tbs + &tb(2, -1, -1, 0, &steps)
    };
    algo("allreduce", 3, false, 2, &(0..3).map(gpu).collect::<Vec<_>>())
}

#[test]
fn a_ring_in_place_has_a_copy_out_of_place() {
    let schedule = Schedule::from_msccl(&ring(3)).unwrap();
    assert_eq!(
        draw_all(schedule.programs()).lines().take(4).collect::<Vec<_>>(),
        [
            "rank 0 ch 0: copy in[0.0] → out[0.0]",
            "rank 0 ch 0: send in[0.0] → 1",
            "rank 0 ch 0: recv 2 → out[2.0], send → 1",
            "rank 0 ch 0: recv 2 → out[1.0]",
        ]
    );
    assert!(schedule.in_place().is_ok());
}

#[test]
fn threadblocks_that_depend_on_each_other_are_one_lane() {
    let schedule = Schedule::from_msccl(&all_pairs()).unwrap();
    assert!(schedule.programs().iter().all(|program| program.lanes.len() == 1), "{schedule}");
    let text = draw_all(&schedule.programs()[..1]);
    let place = |line: &str| text.lines().position(|other| other == line).unwrap_or_else(|| panic!("{line} in {text}"));
    let sum = place("rank 0 ch 0: reduce tmp[1.0] → out[0.0] (last)");
    assert!(place("rank 0 ch 0: recv 1 → tmp[0.0]") < place("rank 0 ch 0: reduce tmp[0.0] → out[0.0]"), "{text}");
    assert!(sum < place("rank 0 ch 0: send out[0.0] → 1") && sum < place("rank 0 ch 0: send out[0.0] → 2"), "{text}");
    assert_eq!(schedule.programs()[0].scratch_segments, 2);
}

/// Without dependencies, threadblocks stay beside each other.
#[test]
fn threadblocks_that_share_nothing_stay_lanes() {
    let gpu = |rank: i32| {
        let other = 1 - rank;
        let half = |chan: i32| {
            let steps = step(0, "s", ("i", chan), ("o", rank * 2 + chan), 1, None)
                + &step(1, "r", ("i", chan), ("o", other * 2 + chan), 1, None);
            tb(chan as u32, other, other, chan as u32, &steps)
        };
        half(0) + &half(1) + &tb(2, -1, -1, 0, &step(0, "cpy", ("i", 0), ("o", rank * 2), 2, None))
    };
    let schedule = Schedule::from_msccl(&algo("allgather", 4, false, 0, &[gpu(0), gpu(1)])).unwrap();
    let channels: Vec<u32> = schedule.programs()[0].lanes.iter().map(|lane| lane.channel).collect();
    assert_eq!(channels.len(), 3, "{schedule}");
    assert!(channels.contains(&0) && channels.contains(&1), "{schedule}");
}

/// Several chunks are one message where a schedule has such a step, and single ones where not.
#[test]
fn counts_become_spans_or_single_messages() {
    let gpu = |rank: i32| {
        let steps = step(0, "s", ("i", 0), ("s", 0), 2, None) + &step(1, "rrc", ("i", 0), ("o", 0), 2, None);
        tb(0, 1 - rank, 1 - rank, 0, &steps)
    };
    let whole = Schedule::from_msccl(&algo("allreduce", 2, false, 0, &[gpu(0), gpu(1)])).unwrap();
    assert_eq!((whole.programs()[0].span, whole.programs()[0].lanes[0].steps.len()), (2, 2), "{whole}");
    let gpu = |rank: i32| {
        let steps = step(0, "s", ("i", 0), ("s", 0), 2, None)
            + &step(1, "r", ("i", 0), ("s", 0), 2, None)
            + &step(2, "cpy", ("i", 0), ("o", 0), 2, None)
            + &step(3, "re", ("s", 0), ("o", 0), 2, None);
        tb(0, 1 - rank, 1 - rank, 0, &steps)
    };
    let single = Schedule::from_msccl(&algo("allreduce", 2, false, 2, &[gpu(0), gpu(1)])).unwrap();
    assert_eq!((single.programs()[0].span, single.programs()[0].lanes[0].steps.len()), (1, 8), "{single}");
    assert_eq!(played(&whole), played(&single));
}

/// NCCL's links hold more messages than two: sends and receives that do not depend on each other change places.
#[test]
fn more_messages_than_a_link_holds_go_in_another_order() {
    let gpu = |rank: i32| {
        let steps = step(0, "s", ("i", 0), ("s", 0), 5, None)
            + &step(1, "r", ("i", 0), ("s", 0), 5, None)
            + &step(2, "cpy", ("i", 0), ("o", 0), 5, None)
            + &step(3, "re", ("s", 0), ("o", 0), 5, None);
        tb(0, 1 - rank, 1 - rank, 0, &steps)
    };
    let schedule = Schedule::from_msccl(&algo("allreduce", 5, false, 5, &[gpu(0), gpu(1)])).unwrap();
    assert_eq!((schedule.programs()[0].span, schedule.programs()[0].parts), (1, 5), "{schedule}");
}

/// Two rings on two channels, each of which must leave the other room when they become one lane.
#[test]
fn rings_that_depend_on_each_other_share_their_links() {
    let (ranks, rings) = (3, 2);
    let gpu = |rank: i32| {
        let ring = |c: i32| {
            let chunk = |hop: i32| ("i", c * ranks + (rank + 2 * ranks - hop) % ranks);
            let kinds = ["s", "rrs", "rrcs", "rcs", "r"];
            let steps = kinds.iter().enumerate().map(|(hop, kind)| {
                // The last step of a ring waits for that of the one before.
                let wait = (*kind == "r" && c > 0).then(|| (c as u32 - 1, 4));
                step(hop as u32, kind, chunk(hop as i32), chunk(hop as i32), 1, wait)
            });
            tb(c as u32, (rank + 1) % ranks, (rank + ranks - 1) % ranks, c as u32, &steps.collect::<String>())
        };
        (0..rings).map(ring).collect::<String>()
    };
    let text = algo("allreduce", (ranks * rings) as usize, true, 0, &(0..ranks).map(gpu).collect::<Vec<_>>());
    let schedule = Schedule::from_msccl(&text).unwrap();
    assert!(schedule.programs().iter().all(|program| program.lanes.len() == 1), "{schedule}");
    let free = Schedule::from_msccl(&text.replace("depid=\"0\" deps=\"4\"", "depid=\"-1\" deps=\"-1\"")).unwrap();
    assert!(free.programs().iter().all(|program| program.lanes.len() == 2), "{free}");
    assert_eq!(played(&free), played(&schedule));
}

/// Scratch memory holds other parts in other windows: what is no race in MSCCL's own, larger memory would be one here.
#[test]
fn scratch_memory_of_the_next_window_is_safe() {
    // Rank 0 sends both parts through one threadblock; rank 1 copies them out of scratch memory in another one.
    let zero = tb(0, 1, -1, 0, &step(0, "s", ("i", 0), ("s", 0), 1, None));
    let zero = zero + &tb(1, -1, -1, 0, &step(0, "cpy", ("i", 0), ("o", 0), 1, None));
    let one = tb(0, -1, 0, 0, &step(0, "r", ("i", 0), ("s", 0), 1, None));
    let one = one + &tb(1, -1, -1, 0, &step(0, "cpy", ("s", 0), ("o", 0), 1, Some((0, 0))));
    let schedule = Schedule::from_msccl(&algo("broadcast", 1, false, 1, &[zero, one])).unwrap();
    assert_eq!(schedule.shape().root, 0);
    assert_eq!(schedule.programs()[1].lanes.len(), 1);
}

/// The root is found where the file does not say it.
#[test]
fn a_reduction_finds_its_root() {
    let send = |to: i32| tb(0, to, -1, 0, &step(0, "s", ("i", 0), ("o", 0), 1, None));
    let sum = step(0, "rrc", ("i", 0), ("o", 0), 1, None);
    let second = step(0, "rrc", ("o", 0), ("o", 0), 1, Some((0, 0)));
    let root = tb(0, -1, 0, 0, &sum) + &tb(1, -1, 2, 0, &second);
    let text = algo("reduce", 1, false, 0, &[send(1), root, send(1)]);
    let schedule = Schedule::from_msccl(&text).unwrap();
    assert_eq!((schedule.shape().collective, schedule.shape().root), (Collective::Reduce, 1));
    let said = Schedule::from_msccl(&text.replace("coll=", "root=\"2\" coll=")).unwrap_err().to_string();
    assert!(said.contains("rank 1, threadblock 0, step 0 (rrc): "), "{said}");
}

/// A plan of mscclpp for two ranks, each with these operations and chunks of scratch memory.
pub(super) fn plan(coll: &str, chunks: (usize, usize), scratch: usize, blocks: [&[&str]; 2]) -> String {
    let gpu = |rank: usize| {
        let list: Vec<String> = blocks[rank]
            .iter()
            .enumerate()
            .map(|(id, ops)| {
                format!(
                    "{{\"id\":{id},\"ops\":[{ops}],\"channels\":[{{\"channel_type\":\"memory\",\"channel_ids\":[{id}]}}],\
                     \"remote_buffer_refs\":[{{\"access_channel_type\":\"memory\",\"remote_buffer_ids\":[0,1]}}]}}"
                )
            })
            .collect();
        let other = 1 - rank;
        let channels = vec![other.to_string(); 4].join(",");
        format!(
            "{{\"id\":{rank},\"input_chunks\":{},\"output_chunks\":{},\"scratch_chunks\":{scratch},\"threadblocks\":[{}],\
             \"channels\":[{{\"channel_type\":\"memory\",\"connected_to\":[{channels}]}}],\"remote_buffers\":[\
             {{\"rank\":{other},\"type\":\"i\",\"access_channel_types\":[\"memory\"]}},\
             {{\"rank\":{other},\"type\":\"s\",\"access_channel_types\":[\"memory\"]}}],\
             \"semaphores\":[{{\"init_value\":0}}]}}",
            chunks.0,
            chunks.1,
            list.join(",")
        )
    };
    format!(
        "{{\"name\":\"test\",\"collective\":\"{coll}\",\"protocol\":\"Simple\",\"inplace\":true,\"gpus\":[{},{}]}}",
        gpu(0),
        gpu(1)
    )
}

pub(super) const SIGNAL: &str = r#"{"name":"signal","channel_ids":[0],"channel_type":"memory"}"#;
pub(super) const WAIT: &str = r#"{"name":"wait","channel_ids":[0],"channel_type":"memory"}"#;

/// An operation with sources and targets: `i0` is ours, `I0` the other rank's input, `S0` its scratch memory.
pub(super) fn op(name: &str, sources: &[&str], targets: &[&str]) -> String {
    let buffer = |text: &&str| {
        let (kind, index) = text.split_at(1);
        let (index, size) = index.split_once('+').unwrap_or((index, "1"));
        let of = match kind {
            "I" => "\"buffer_id\":0".to_owned(),
            "S" => "\"buffer_id\":1".to_owned(),
            ours => format!("\"type\":\"{ours}\""),
        };
        format!("{{{of},\"index\":{index},\"size\":{size}}}")
    };
    let list = |all: &[&str]| all.iter().map(buffer).collect::<Vec<_>>().join(",");
    let (sources, targets) = (list(sources), list(targets));
    format!(
        "{{\"name\":\"{name}\",\"src_buff\":[{sources}],\"dst_buff\":[{targets}],\"channel_type\":\"memory\",\
         \"channel_ids\":[0]}}"
    )
}

fn joined(ops: &[&str]) -> String {
    ops.join(",")
}

/// Both read the other's half, add it, and write the sum there: nothing is sent by the one whose memory it is.
#[test]
fn reads_and_writes_become_messages() {
    let rlx = [SIGNAL.replace("signal", "rlxsignal"), WAIT.replace("wait", "rlxwait")];
    let half = |chunk: usize| {
        let (ours, theirs) = (format!("i{chunk}"), format!("I{chunk}"));
        let add = op("rres", &[&ours, &theirs], &[&ours, &theirs]);
        joined(&[&rlx[0], &rlx[1], "{\"name\":\"nop\"}", &add, SIGNAL, WAIT])
    };
    let text = plan("allreduce", (2, 2), 0, [&[&half(0)], &[&half(1)]]);
    let schedule = Schedule::from_mscclpp(&text).unwrap();
    assert_eq!(
        draw_all(&schedule.programs()[..1]),
        "rank 0 ch 0: send in[0.1] → 1\n\
         rank 0 ch 0: recv 1, reduce in[0.0] → out[0.0] (last), send → 1\n\
         rank 0 ch 0: recv 1 → out[0.1]\n"
    );
    assert!(schedule.in_place().is_ok());
}

/// Packets say themselves that they are there.
#[test]
fn packets_become_messages() {
    let rank = |own: &str, other: &str, theirs: &str| {
        joined(&[
            &op("ppkt", &[other], &["S0"]),
            &op("respkt", &[own, "s0"], &[own, "S1"]),
            &op("upkt", &["s1"], &[theirs]),
        ])
    };
    let text = plan("allreduce", (2, 2), 2, [&[&rank("i0", "i1", "i1")], &[&rank("i1", "i0", "i0")]]);
    let schedule = Schedule::from_mscclpp(&text).unwrap();
    assert_eq!(
        draw_all(&schedule.programs()[..1]),
        "rank 0 ch 0: send in[0.1] → 1\n\
         rank 0 ch 0: recv 1, reduce in[0.0] → out[0.0] (last), send → 1\n\
         rank 0 ch 0: recv 1 → out[0.1]\n"
    );
    assert_eq!(schedule.programs()[0].scratch_segments, 0);
}

/// Another threadblock overwrites what was sent: the packet that it has comes from a sum of that.
#[test]
fn packets_say_what_was_read() {
    let rank = |own: &str, other: &str| {
        let first = joined(&[&op("ppkt", &[other], &["S0"]), &op("respkt", &[own, "s0"], &[own, "S1"])]);
        [first, op("upkt", &["s1"], &[other])]
    };
    let [a, b] = [rank("i0", "i1"), rank("i1", "i0")];
    let text = plan("allreduce", (2, 2), 2, [&[&a[0], &a[1]], &[&b[0], &b[1]]]);
    let schedule = Schedule::from_mscclpp(&text).unwrap();
    assert_eq!(schedule.programs()[0].lanes.iter().map(|lane| lane.steps.len()).sum::<usize>(), 3, "{schedule}");
}

/// A second threadblock waits for the first by a semaphore, or by a barrier; two have a share each.
#[test]
fn threadblocks_wait_for_each_other() {
    let release = r#"{"name":"sem_release","semaphore_ids":[0]}"#;
    let acquire = r#"{"name":"sem_acquire","semaphore_ids":[0]}"#;
    let barrier = r#"{"name":"barrier","barrier_id":0,"num_threadblocks":2}"#;
    for (behind, before) in [(release, acquire), (barrier, barrier)] {
        let first = joined(&[&op("put", &["i0"], &["S0"]), SIGNAL, WAIT, behind]);
        let second = joined(&[before, &op("re", &["i0", "s0"], &["i0"])]);
        let text = plan("allreduce", (1, 1), 1, [&[&first, &second], &[&first, &second]]);
        let schedule = Schedule::from_mscclpp(&text).unwrap();
        assert_eq!(schedule.programs()[0].lanes.len(), 1, "{schedule}");
        // Without the second one's wait, nothing orders the two.
        let text = text.replace(&format!("{before},"), "").replace(&format!(",{behind}"), "");
        let said = Schedule::from_mscclpp(&text).unwrap_err().to_string();
        let words = "threadblock 1, operation 0 (re): writes chunk 0 of the input buffer, and nothing orders that with rank 0, ";
        assert!(said.contains(words) && said.ends_with("threadblock 0"), "{said}");
    }
}

#[test]
fn shares_of_a_group_are_chunks() {
    let share = |id: usize| {
        let info = format!("\"tbg_info\":{{\"tb_id\":{id},\"tbg_size\":2}},\"channel_type\"");
        let put = op("put", &["o0"], &["S0"]).replace("\"channel_type\"", &info);
        let copy = op("copy", &["s0"], &["o1"]).replace("\"channel_type\"", &info);
        (put, copy)
    };
    let rank = |id: usize, own: &str, other: &str| {
        let (put, copy) = share(id);
        joined(&[&put.replace("\"index\":0", own), SIGNAL, WAIT, &copy.replace("\"index\":1", other)])
    };
    let (own, other) = ("\"index\":0", "\"index\":1");
    let [a, b] = [0, 1].map(|id| rank(id, own, other));
    // Rank 1 has its part behind that of rank 0.
    let swap = |text: &str| {
        text.replace("\"type\":\"o\",\"index\":0", "X")
            .replace("\"type\":\"o\",\"index\":1", "\"type\":\"o\",\"index\":0")
            .replace('X', "\"type\":\"o\",\"index\":1")
    };
    let text = plan("allgather", (1, 2), 1, [&[&a, &b], &[&swap(&a), &swap(&b)]]);
    let schedule = Schedule::from_mscclpp(&text).unwrap();
    assert_eq!((schedule.programs()[0].parts, schedule.programs()[0].lanes.len()), (2, 2), "{schedule}");
}

/// What stands in a pipeline runs once: the windows of a schedule are its iterations.
#[test]
fn a_pipeline_is_its_steps() {
    let steps = joined(&[&op("put", &["i0"], &["S0"]), SIGNAL, WAIT, &op("re", &["i0", "s0"], &["i0"])]);
    let pipeline =
        format!("{{\"name\":\"pipeline\",\"iter_context\":{{\"unit_size\":1024,\"num_chunks\":1}},\"ops\":[{steps}]}}");
    let plain = Schedule::from_mscclpp(&plan("allreduce", (1, 1), 1, [&[&steps], &[&steps]])).unwrap();
    let piped = Schedule::from_mscclpp(&plan("allreduce", (1, 1), 1, [&[&pipeline], &[&pipeline]])).unwrap();
    assert_eq!(piped, plain);
}
