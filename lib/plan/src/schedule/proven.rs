//! A schedule that any caller may build: the programs of all ranks with the proof of their result.

use std::fmt;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::draw::draw_all;
use super::verify::{VerifyError, verify};
use super::{Program, Shape};
use crate::wire::Header;

/// Messages that every link holds: the least that a communicator can be set to.
const DEPTH: usize = 2;
/// Windows that the proof goes through: one alone, and one that others surround.
const WINDOWS: [usize; 2] = [1, 3];

/// The programs of all ranks of a collective, which [`verify`] has proved. `Comm::run_program` of the crate `tinynccl`
/// runs it.
///
/// Its text has a line for the shape, and the lines of [`draw`](super::draw) below; it can be parsed:
/// ```
/// use tinynccl_plan::schedule::Schedule;
///
/// let text = "
///     ## Rank 0 sends to rank 1.
///     schedule: broadcast, 2 ranks, root 0, 1 parts
///     rank 0 ch 0: send in[0.0] -> 1
///     rank 0 ch 0: copy in[0.0] -> out[0.0]
///     rank 1 ch 0: recv 0 -> out[0.0]
/// ";
/// let schedule: Schedule = text.parse()?;
/// assert_eq!(schedule.to_string().parse::<Schedule>()?, schedule);
/// # Ok::<(), tinynccl_plan::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Schedule {
    shape: Shape,
    programs: Arc<[Program]>,
    fingerprint: u64,
    /// Longest message in bytes, if it is to be shorter than what the communicator allows.
    message: Option<usize>,
    /// Why it must not run in place, if so.
    in_place: Result<(), VerifyError>,
}

impl Schedule {
    /// Proves that `programs`, one per rank, execute `shape`.
    ///
    /// # Errors
    /// The first error, naming rank, lane and step, the peer, the expected and the found value.
    pub fn new(shape: Shape, programs: Vec<Program>) -> Result<Schedule, VerifyError> {
        if shape.root >= shape.ranks {
            return Err(VerifyError::Programs(format!(
                "root is {}, expected a rank below {}",
                shape.root, shape.ranks
            )));
        }
        let prove = |in_place| {
            WINDOWS.iter().try_for_each(|&windows| verify(&programs, &shape, DEPTH, windows, in_place).map(|_| ()))
        };
        prove(false)?;
        // A shape of no rank with both buffers is the same in place.
        let in_place = match (0..shape.ranks).any(|rank| shape.in_place(rank).is_some()) {
            true => prove(true),
            false => Err(VerifyError::Programs(format!("{} has no form in place", shape.collective))),
        };
        let programs: Arc<[Program]> = programs.into();
        let mut schedule = Schedule { shape, programs, fingerprint: 0, message: None, in_place };
        schedule.fingerprint = fingerprint(&schedule.to_string());
        Ok(schedule)
    }

    /// Returns the schedule with messages of at most this many bytes: a long way fills faster with short ones.
    pub fn with_message(self, bytes: usize) -> Schedule {
        let mut schedule = Schedule { message: Some(bytes.max(1)), ..self };
        schedule.fingerprint = fingerprint(&schedule.to_string());
        schedule
    }

    /// Longest message in bytes over links that allow `most`.
    pub fn message(&self, most: usize) -> usize {
        self.message.map_or(most, |message| message.min(most))
    }

    /// The collective, and the number of ranks.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Programs of all ranks, in rank order.
    pub fn programs(&self) -> &[Program] {
        &self.programs
    }

    /// Equal on all ranks that have the same programs, and never 0; ranks compare it before data moves. 56 bits of the
    /// SHA-256 of the text, as 14 hexadecimal digits in errors.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Returns `Ok` if input and output may be the same memory.
    ///
    /// # Errors
    /// The proof's error, or that the collective has no form in place.
    pub fn in_place(&self) -> Result<(), &VerifyError> {
        self.in_place.as_ref().copied()
    }
}

impl PartialEq for Schedule {
    fn eq(&self, other: &Schedule) -> bool {
        let equal = self.shape == other.shape && self.message == other.message;
        equal && Arc::ptr_eq(&self.programs, &other.programs)
            || self.fingerprint == other.fingerprint && self.to_string() == other.to_string()
    }
}

impl Eq for Schedule {}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { collective, ranks, root, .. } = self.shape;
        write!(f, "schedule: {}, {ranks} ranks", collective.name())?;
        if collective.has_root() {
            write!(f, ", root {root}")?;
        }
        let (parts, span) = self.programs.first().map_or((1, 1), |program| (program.parts, program.span));
        write!(f, ", {parts} parts")?;
        if span > 1 {
            write!(f, ", span {span}")?;
        }
        if let Some(message) = self.message {
            write!(f, ", message {message}")?;
        }
        match self.programs.iter().map(|program| program.scratch_segments).max().unwrap_or(0) {
            0 => writeln!(f)?,
            segments => writeln!(f, ", scratch {segments}")?,
        }
        f.write_str(&draw_all(&self.programs))
    }
}

/// The first bits of the text's SHA-256, as many as fit in a message's header; never 0.
fn fingerprint(text: &str) -> u64 {
    let [first, ..]: [[u8; 8]; 4] = bytemuck::cast(<[u8; 32]>::from(Sha256::digest(text)));
    (u64::from_be_bytes(first) >> (u64::BITS - Header::FINGERPRINT)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm;
    use crate::schedule::{Lane, Loc, Step};
    use crate::wire::{Algorithm, Collective};

    fn shape(collective: Collective, ranks: usize) -> Shape {
        Shape { collective, ranks, root: 0, channels: 1 }
    }

    fn built_in(algorithm: Algorithm, shape: &Shape) -> Vec<Program> {
        (0..shape.ranks).map(|rank| algorithm::program(algorithm, shape, rank).unwrap()).collect()
    }

    #[test]
    fn every_algorithm_is_accepted_and_its_text_is_itself() {
        for algorithm in Algorithm::ALL {
            for collective in Collective::ALL {
                for ranks in 1..=9 {
                    for (root, channels) in [(0, 1), (ranks - 1, 2)] {
                        let shape = Shape { root, channels, ..shape(collective, ranks) };
                        let shape = Shape { root: if collective.has_root() { root } else { 0 }, ..shape };
                        if !algorithm::supports(algorithm, &shape) {
                            continue;
                        }
                        let schedule = Schedule::new(shape, built_in(algorithm, &shape)).unwrap();
                        assert_eq!(
                            schedule.in_place().is_ok(),
                            collective != Collective::AllToAll,
                            "{algorithm} {shape:?}"
                        );
                        let text = schedule.to_string();
                        let again: Schedule = text.parse().unwrap_or_else(|error| panic!("{error} in {text}"));
                        assert_eq!(again, schedule);
                        assert_eq!((again.to_string(), again.fingerprint()), (text, schedule.fingerprint()));
                    }
                }
            }
        }
    }

    #[test]
    fn another_step_is_another_fingerprint() {
        let shape = shape(Collective::AllReduce, 4);
        let of = |algorithm| Schedule::new(shape, built_in(algorithm, &shape)).unwrap();
        let all: std::collections::BTreeSet<u64> =
            [Algorithm::Ring, Algorithm::Tree, Algorithm::Direct].map(|a| of(a).fingerprint()).into();
        assert_eq!(all.len(), 3);
        assert_ne!(of(Algorithm::Ring), of(Algorithm::Tree));
        let ring = of(Algorithm::Ring).with_message(4096);
        assert_ne!(ring.fingerprint(), of(Algorithm::Ring).fingerprint());
        let again: Schedule = ring.to_string().parse().unwrap();
        assert_eq!((&again, again.message(8192), again.message(100)), (&ring, 4096, 100));
        assert_eq!(fingerprint(""), 0xe3_b0c4_4298_fc1c, "SHA-256 of nothing: the same in every build");
    }

    #[test]
    fn what_is_wrong_is_refused_with_the_verifiers_words() {
        let shape = shape(Collective::AllReduce, 3);
        let mut programs = built_in(Algorithm::Ring, &shape);
        programs[1].lanes[0].steps.pop();
        let error = Schedule::new(shape, programs).unwrap_err().to_string();
        assert_eq!(error, "1 message(s) from rank 0 to rank 1 on channel 0 are left over");
        let mut programs = built_in(Algorithm::Ring, &shape);
        let steps = &mut programs[1].lanes[0].steps;
        steps.pop();
        steps.push(Step::recv(0, Loc::output(0, 1)));
        let error = Schedule::new(shape, programs).unwrap_err().to_string();
        assert!(error.starts_with("rank 1, lane 0, step 4 (recv 0 → out[0.1]), window 0: "), "{error}");
        assert!(Schedule::new(Shape { root: 3, ..shape }, vec![]).unwrap_err().to_string().contains("below 3"));
    }

    /// It reads its input again after it has written the output.
    #[test]
    fn a_schedule_may_be_right_out_of_place_alone() {
        let shape = shape(Collective::AllReduce, 2);
        let program = |peer| {
            let steps = vec![
                Step::recv_reduce_copy(peer, Loc::input(0, 0), Loc::output(0, 0), true),
                Step::send(peer, Loc::input(0, 0)),
            ];
            let mut program =
                Program { parts: 1, span: 1, scratch_segments: 0, lanes: vec![Lane { channel: 0, steps }] };
            if peer == 0 {
                program.lanes[0].steps.reverse();
            }
            program
        };
        let schedule = Schedule::new(shape, vec![program(1), program(0)]).unwrap();
        let error = schedule.in_place().unwrap_err().to_string();
        assert!(error.contains("reads in[0.0], where a result is already"), "{error}: {schedule}");
    }
}
