//! `TINYNCCL_VERIFY` on GPUs: sums of a chosen call's inputs and outputs, exchanged and compared on the device, in the
//! stream of the call, so that nothing waits and a captured graph verifies its replays, too.
//!
//! Moved data must be at its end what it was in the source. Reduced data are reduced a second time, from
//! a copy of the input, and both results must have the same bits: every kernel reduces in one order. The host learns
//! of a difference in [`DeviceComm::check`] and at the next call.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, CudaFunction, CudaModule, CudaStream, DriverError, result, sys};

use crate::driver::compile::compile;
use crate::driver::{self, cuda};
use crate::kernels::{Function, THREADS, launch_with};
use tinynccl_comm::RawCall;
use tinynccl_comm::verify::{Account, Chosen};
use tinynccl_plan::Call;
use tinynccl_plan::algorithm::Shape;
use tinynccl_plan::dtype::{DType, ReduceOp};
use tinynccl_plan::error::{Error, Result, Suspect};
use tinynccl_plan::wire::Collective;
use tinynccl_sys::config::Config;

/// Most sums of all ranks together.
const MOST: usize = 4096;
/// Most sums of one rank.
const MOST_OF_RANK: usize = 256;
/// Most parts of a segment.
const MOST_PARTS: usize = 64;
/// Bytes of a part, where there are not too many.
const PART: usize = 64 << 10;
/// Most blocks of a kernel that sums one buffer.
const MOST_BLOCKS: usize = 1024;
/// Verified calls that are remembered until the device has compared them.
const REMEMBERED: usize = 256;

/// As `struct Sums` of `kernels/verify.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    at: u64,
    bytes: u64,
    to: u64,
    parts: u32,
    split: u32,
    blocks: u32,
    unused: u32,
}

/// As `struct Jobs` there.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Jobs {
    job: [Sums; 4],
}

impl Sums {
    /// Makes sums of `segments` segments of `bytes` bytes.
    fn new(at: u64, bytes: usize, segments: usize, parts: usize, to: u64) -> Sums {
        let per_block = 8 * 16 * THREADS as usize;
        let units = segments * parts;
        let split = bytes.div_ceil(parts).div_ceil(per_block).clamp(1, (MOST_BLOCKS / units.max(1)).max(1));
        let (blocks, parts, split) = ((units * split) as u32, parts as u32, split as u32);
        Sums { at, bytes: bytes as u64, to, parts, split, blocks, unused: 0 }
    }
}

/// As `struct Compare` there.
#[repr(C)]
struct Compare {
    table: u64,
    finding: u64,
    ranks: u32,
    kind: u32,
    inputs: u32,
    outputs: u32,
    parts: u32,
    root: u32,
    number: u32,
    extra: u32,
}

/// As `struct Flip` there.
#[repr(C)]
struct Flip {
    at: u64,
    bit: u32,
    delay: u32,
}

/// A chosen call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Chose {
    number: u32,
    call: Call,
    shape: Shape,
    kind: u32,
    /// Segments of which there are sums on each rank.
    inputs: usize,
    outputs: usize,
    parts: usize,
}

impl Chose {
    /// `None` for a call that is not verified on a device.
    fn new(number: u32, call: &Call, ranks: usize) -> Option<Chose> {
        use Collective::{AllGather, AllReduce, AllToAll, Broadcast, Reduce, ReduceScatter};
        let (kind, inputs, outputs) = match call.collective {
            Reduce | ReduceScatter => (0, 1, 1),
            AllReduce => (1, 1, 1),
            AllGather => (2, 1, ranks),
            Broadcast => (3, 1, 1),
            AllToAll => (4, ranks, ranks),
            _ => return None,
        };
        let most = (MOST_OF_RANK.min(MOST / ranks) - 2) / (inputs + outputs);
        let parts = call.bytes().div_ceil(PART).clamp(1, most.clamp(1, MOST_PARTS));
        let shape = Shape { collective: call.collective, ranks, root: call.root, channels: 1 };
        let fits = call.bytes() > 0 && ((inputs + outputs) * parts + 2) * ranks <= MOST;
        fits.then_some(Chose { number, call: *call, shape, kind, inputs, outputs, parts })
    }

    /// Sums of each rank.
    fn words(&self) -> usize {
        (self.inputs + self.outputs) * self.parts + self.extra()
    }

    /// Sums of a reduction's whole input, before the call and after it.
    fn extra(&self) -> usize {
        if self.repeats() { 2 } else { 0 }
    }

    pub(crate) fn repeats(&self) -> bool {
        self.call.collective.reduces()
    }

    /// Bytes of a rank's input and output.
    fn bytes(&self, rank: usize) -> [usize; 2] {
        [self.shape.input_segments(rank), self.shape.output_segments(rank)].map(|n| n * self.call.bytes())
    }

    /// Sum of one part in the sums of all ranks. Of a reduction, the repetition's are those of the input.
    fn of(&self, table: &[u64], rank: usize, output: bool, segment: usize, part: usize) -> u64 {
        let segment = if output { self.inputs + segment } else { segment };
        table.get(rank * self.words() + segment * self.parts + part).copied().unwrap_or(0)
    }

    /// The error of sums that differ.
    fn judge(&self, rank: usize, table: &[u64]) -> Error {
        let ranks = 0..self.shape.ranks;
        let (suspect, segment, part, wrong, [expected, got]) = if self.repeats() {
            let pair = |r: usize, p: usize| [false, true].map(|output| self.of(table, r, output, 0, p));
            let differs = |r: usize, p: usize| pair(r, p)[0] != pair(r, p)[1];
            // Only an all_reduce has the same result everywhere.
            let odd_one = |r: usize, p: usize| self.kind == 1 && pair(r, p) != pair(0, p);
            let extra = |r: usize| {
                let at = (r + 1) * self.words() - 2;
                [0, 1].map(|i| table.get(at + i).copied().unwrap_or(0))
            };
            let changed = ranks.clone().find(|&r| extra(r)[0] != extra(r)[1]);
            let part = (0..self.parts).find(|&p| ranks.clone().any(|r| differs(r, p) || odd_one(r, p)));
            let part = part.unwrap_or(0);
            let odd: Vec<usize> = ranks.clone().filter(|&r| differs(r, part)).collect();
            let suspect = match (changed, &odd[..]) {
                (Some(rank), _) => Suspect::Memory { rank },
                (None, &[rank]) => Suspect::Memory { rank },
                _ => Suspect::Ranks(if odd.is_empty() { ranks.collect() } else { odd.clone() }),
            };
            let wrong = odd.first().copied().unwrap_or(changed.unwrap_or(0));
            let sums = if odd.is_empty() { extra(wrong) } else { pair(wrong, part) };
            (suspect, 0, part, wrong, sums)
        } else {
            let sum = |r: usize, segment: usize, output: bool| {
                (0..self.parts).fold(0u64, |sum, p| sum.rotate_left(9) ^ self.of(table, r, output, segment, p))
            };
            let words: Vec<u64> = ranks
                .flat_map(|r| {
                    let inputs = (0..self.inputs).map(move |s| sum(r, s, false));
                    inputs.chain((0..self.outputs).map(move |s| sum(r, s, true))).collect::<Vec<_>>()
                })
                .collect();
            let account = Account::new(self.shape, self.call.bytes());
            let Some(finding) = account.and_then(|account| account.judge(&words, "memory of GPUs")) else {
                return Error::invalid("verify", "sums of a device's memory that differ are equal again");
            };
            let (right, wrong) = (finding.right, finding.wrong);
            let pair = |p: usize| [right, wrong].map(|s| self.of(table, s.rank, s.output, s.index, p));
            let part = (0..self.parts).find(|&p| pair(p)[0] != pair(p)[1]).unwrap_or(0);
            (finding.suspect, wrong.index, part, wrong.rank, pair(part))
        };
        let words = self.call.bytes().div_ceil(8).div_ceil(self.parts);
        let start = (8 * words * part).min(self.call.bytes());
        let end = (8 * words * (part + 1)).min(self.call.bytes());
        Error::Corrupt {
            op: format!("{} #{} on a GPU", self.call.collective, self.number),
            rank,
            suspect: Box::new(suspect),
            buffer: format!("output of rank {wrong}"),
            offset: (segment * self.call.bytes() + start) as u64,
            bytes: (end - start) as u64,
            expected,
            got,
        }
    }
}

/// A place where [`Verifier::spoil`] flips a bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(hidden)]
pub enum Spoil {
    /// The call's input, when its sum is made.
    Source,
    /// The call's output, before its sum is made.
    Result,
    /// A slot in this rank's window, at some time during the call.
    Window,
}

/// A flip to be made: the place, the bit, and a window's address and length.
type Spoiled = (Spoil, usize, Option<(u64, usize)>);

/// Verification of one rank's calls.
#[derive(Debug)]
pub(crate) struct Verifier {
    context: Arc<CudaContext>,
    chosen: Chosen,
    rank: usize,
    ranks: usize,
    calls: AtomicU32,
    remembered: Mutex<VecDeque<Chose>>,
    /// `struct Finding` in page-locked memory.
    finding: *mut u32,
    cause: Mutex<Option<Error>>,
    /// For tests.
    spoil: Mutex<Option<Spoiled>>,
    /// Stream of flips during a call.
    beside: Arc<CudaStream>,
    functions: [CudaFunction; 3],
    _module: Arc<CudaModule>,
}

// SAFETY: the memory is page-locked, lives as long as this, and is read by volatile loads; the rest may be shared.
unsafe impl Send for Verifier {}
// SAFETY: as above.
unsafe impl Sync for Verifier {}

fn failed(error: DriverError) -> Error {
    cuda("verify", "sums of device memory", error)
}

impl Verifier {
    /// `None` where no call is chosen.
    pub(crate) fn new(
        context: &Arc<CudaContext>,
        (rank, ranks): (usize, usize),
        config: &Config,
    ) -> Result<Option<Verifier>> {
        let Some(chosen) = Chosen::of(config).filter(|_| ranks > 1) else { return Ok(None) };
        let defines = [format!("-DTHREADS={THREADS}"), format!("-DMOST_SUMS={MOST}")];
        let capability = context.compute_capability().map_err(failed)?;
        let ptx = compile("verify.cu", SOURCE, &defines, capability)?;
        context.bind_to_thread().map_err(failed)?;
        let module = context.load_module(ptx).map_err(failed)?;
        let load = |name: &str| {
            let function = module.load_function(name).map_err(failed)?;
            // A use, so that its code is loaded by now.
            function.num_regs().map_err(failed)?;
            Ok::<_, Error>(function)
        };
        let functions = [load("verify_sums")?, load("verify_compare")?, load("verify_flip")?];
        let bytes = 8 + 8 * MOST;
        // SAFETY: freed in `drop`; written before anyone else has it.
        let finding = unsafe {
            let finding = result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_PORTABLE).map_err(failed)?.cast::<u32>();
            finding.cast::<u8>().write_bytes(0, bytes);
            finding
        };
        Ok(Some(Verifier {
            context: context.clone(),
            chosen,
            rank,
            ranks,
            calls: AtomicU32::new(0),
            remembered: Mutex::default(),
            finding,
            cause: Mutex::default(),
            spoil: Mutex::default(),
            beside: context.new_stream().map_err(failed)?,
            functions,
            _module: module,
        }))
    }

    /// Counts a call; gives it if it is to be verified. The same on all ranks.
    pub(crate) fn next(&self, call: &Call) -> Option<Chose> {
        let number = self.calls.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let chose = Chose::new(number, call, self.ranks).filter(|_| self.chosen.has(number))?;
        let mut remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        if remembered.len() == REMEMBERED {
            remembered.pop_front();
        }
        remembered.push_back(chose);
        Some(chose)
    }

    /// The call that carries the sums of a chosen one to all ranks.
    pub(crate) fn exchange(&self, words: usize) -> Call {
        Call::new(Collective::AllGather, DType::U64, ReduceOp::Sum, 0, words)
    }

    /// Calls that carry sums, of all sizes.
    pub(crate) fn exchanges(&self) -> [RawCall; 2] {
        [2, MOST_OF_RANK].map(|words| RawCall::on_device(self.exchange(words), 0, 0))
    }

    /// Flips `bit` of the next chosen call's input, output or, at an address and of so many bytes, window.
    pub(crate) fn spoil(&self, place: Spoil, bit: usize, window: Option<(u64, usize)>) {
        *self.spoil.lock().unwrap_or_else(PoisonError::into_inner) = Some((place, bit, window));
    }

    /// The difference that a chosen call showed, which is forgotten.
    pub(crate) fn take(&self) -> Option<Error> {
        let found = self.check().err();
        *self.cause.lock().unwrap_or_else(PoisonError::into_inner) = None;
        // SAFETY: our memory, which no kernel writes meanwhile, by the test that calls this.
        unsafe { self.finding.write_volatile(0) };
        found
    }

    /// # Safety
    /// The parameters must be those of the kernel, and the memory that they name valid until it has run.
    unsafe fn launch<P>(&self, kernel: usize, blocks: u32, stream: sys::CUstream, parameters: &P) -> Result<()> {
        self.context.bind_to_thread().map_err(failed)?;
        let function = Function::late(self.functions[kernel].cu_function());
        let parameters: [*const c_void; 1] = [(&raw const *parameters).cast()];
        // SAFETY: forwarded from the caller.
        unsafe { launch_with(function, blocks, stream, parameters) }.map_err(failed)
    }

    /// # Safety
    /// The memory of `jobs` must be valid until the stream has passed this.
    unsafe fn sums(&self, stream: sys::CUstream, jobs: &[Sums]) -> Result<()> {
        let mut all = Jobs::default();
        let jobs = jobs.iter().filter(|job| job.blocks > 0);
        all.job.iter_mut().zip(jobs).for_each(|(to, job)| *to = *job);
        match all.job.iter().map(|job| job.blocks).sum() {
            0 => Ok(()),
            // SAFETY: forwarded from the caller.
            blocks => unsafe { self.launch(0, blocks, stream, &all) },
        }
    }

    /// Flips a bit of the memory if a test wants one here.
    ///
    /// # Safety
    /// `at` must hold `bytes` bytes until the stream has passed this.
    unsafe fn flip(&self, stream: sys::CUstream, place: Spoil, at: u64, bytes: usize) -> Result<()> {
        let mut spoil = self.spoil.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((_, bit, window)) = spoil.filter(|(wanted, ..)| *wanted == place) else { return Ok(()) };
        let (at, bytes) = window.unwrap_or((at, bytes));
        if bytes == 0 {
            return Ok(());
        }
        *spoil = None;
        let (byte, delay) = (bit / 8 % bytes, (bit >> 20) as u32 % 100_000);
        let delay = if window.is_some() { delay } else { 0 };
        let stream = if window.is_some() { self.beside.cu_stream() } else { stream };
        // SAFETY: forwarded from the caller.
        unsafe { self.launch(2, 1, stream, &Flip { at: at + byte as u64, bit: bit as u32 % 8, delay }) }
    }

    /// Bytes of device memory that [`Verifier::verify`] takes.
    pub(crate) fn scratch(&self, chose: &Chose) -> usize {
        let [input, output] = chose.bytes(self.rank).map(|bytes| bytes.next_multiple_of(256));
        let sums = (chose.words() * 8).next_multiple_of(256) + (chose.words() * 8 * self.ranks).next_multiple_of(256);
        sums + if chose.repeats() { input + output } else { 0 }
    }

    /// Makes a call by `carry`, with all that verifies it around, in `scratch`.
    ///
    /// # Safety
    /// As [`DeviceComm::enqueue`](crate::DeviceComm::enqueue); `carry` must enqueue a call on `stream`.
    pub(crate) unsafe fn verify(
        &self,
        stream: sys::CUstream,
        call: &RawCall,
        chose: &Chose,
        scratch: u64,
        carry: impl Fn(&RawCall) -> Result<()>,
    ) -> Result<()> {
        let (input, output) = call.device_addresses();
        let [read, written] = chose.bytes(self.rank);
        let (ours, words) = (scratch, chose.words());
        let table = ours + (words * 8).next_multiple_of(256) as u64;
        let copy = table + (words * 8 * self.ranks).next_multiple_of(256) as u64;
        let again = copy + read.next_multiple_of(256) as u64;
        let out = ours + (chose.inputs * chose.parts * 8) as u64;
        let extra = ours + ((words - chose.extra()) * 8) as u64;
        let (ins, outs) = (chose.shape.input_segments(self.rank), chose.shape.output_segments(self.rank));
        // SAFETY: by the caller; places in the scratch memory as `scratch` counts them.
        unsafe {
            self.context.bind_to_thread().map_err(failed)?;
            let (bytes, parts) = (chose.call.bytes(), chose.parts);
            let segments = |at: u64, segments: usize, to: u64| Sums::new(at, bytes, segments, parts, to);
            let [of_input, of_output] = [segments(input, ins, ours), segments(output, outs, out)];
            let whole = |at: u64, to: u64| Sums::new(at, read, 1, 1, to);
            if ins == 0 || outs == 0 || [of_input, of_output, whole(copy, extra)].iter().any(|sums| sums.split > 1) {
                result::memset_d8_async(ours, 0, words * 8, stream).map_err(failed)?;
            }
            if chose.repeats() {
                driver::copy("verify", &self.context, stream, input, copy, read)?;
            } else {
                self.sums(stream, &[of_input])?;
            }
            self.flip(stream, Spoil::Source, input, read)?;
            carry(call)?;
            self.flip(stream, Spoil::Window, 0, 0)?;
            self.flip(stream, Spoil::Result, output, written)?;
            if chose.repeats() {
                carry(&RawCall::on_device(**call, copy, again))?;
                // In place the input is gone.
                let apart = output >= input + read as u64 || input >= output + written as u64;
                let after = whole(if apart { input } else { copy }, extra + 8);
                self.sums(stream, &[of_output, segments(again, outs, ours), whole(copy, extra), after])?;
            } else {
                self.sums(stream, &[of_output])?;
            }
            carry(&RawCall::on_device(self.exchange(words), ours, table))?;
            let compare = Compare {
                table,
                finding: self.finding.addr() as u64,
                ranks: self.ranks as u32,
                kind: chose.kind,
                inputs: chose.inputs as u32,
                outputs: chose.outputs as u32,
                parts: chose.parts as u32,
                root: chose.call.root as u32,
                number: chose.number,
                extra: chose.extra() as u32,
            };
            self.launch(1, 1, stream, &compare)
        }
    }

    /// The difference that a chosen call showed, if one did.
    ///
    /// # Errors
    /// [`Error::Corrupt`].
    #[inline]
    pub(crate) fn check(&self) -> Result<()> {
        // SAFETY: our memory, written by the device.
        if unsafe { self.finding.read_volatile() } == 0 { Ok(()) } else { Err(self.found()) }
    }

    #[cold]
    fn found(&self) -> Error {
        let mut cause = self.cause.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cause) = &*cause {
            return cause.clone();
        }
        std::sync::atomic::fence(Ordering::Acquire);
        // SAFETY: `struct Finding`, which was complete before its state was set.
        let (number, table) = unsafe {
            let table = self.finding.add(2).cast::<u64>();
            (self.finding.add(1).read_volatile(), std::slice::from_raw_parts(table, MOST).to_vec())
        };
        let remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        let chose = remembered.iter().rev().find(|chose| chose.number == number);
        let error = match chose {
            Some(chose) => chose.judge(self.rank, &table),
            None => Error::invalid(
                "verify",
                format!("call {number} on a GPU had wrong bits; it was too long ago to say more"),
            ),
        };
        cause.insert(error).clone()
    }
}

impl Drop for Verifier {
    fn drop(&mut self) {
        let freed = self.context.bind_to_thread().and_then(|()| {
            // SAFETY: allocated in `new`; the communicator has waited for its kernels, or keeps everything.
            unsafe { result::free_host(self.finding.cast()) }
        });
        if let Err(error) = freed {
            log::debug!("rank {}: page-locked memory is kept: {error:?}", self.rank);
        }
    }
}

const SOURCE: &str = include_str!("kernels/verify.cu");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::mirrored;

    /// The host's structs are the kernels'. NVRTC needs no GPU.
    #[test]
    fn its_kernels_compile() {
        let layouts = [
            mirrored!(Sums as "Sums" { at, bytes, to, parts, split, blocks }),
            mirrored!(Jobs as "Jobs" { job }),
            mirrored!(Compare as "Compare" { table, finding, ranks, kind, inputs, outputs, parts, root, number, extra }),
            mirrored!(Flip as "Flip" { at, bit, delay }),
        ];
        let asserts: String =
            layouts.concat().iter().map(|(what, n)| format!("static_assert({what} == {n}, \"\");\n")).collect();
        let defines = [format!("-DTHREADS={THREADS}"), format!("-DMOST_SUMS={MOST}")];
        match compile("verify.cu", &[SOURCE, &asserts].concat(), &defines, (9, 0)) {
            Ok(_) => {}
            Err(error @ Error::Unsupported { .. }) => eprintln!("SKIPPED its_kernels_compile: {error}"),
            Err(error) => panic!("{error}"),
        }
    }

    fn chose(collective: Collective, count: usize, ranks: usize) -> Chose {
        Chose::new(7, &Call::new(collective, DType::F32, ReduceOp::Sum, 0, count), ranks).unwrap()
    }

    fn suspect(error: &Error) -> (&Suspect, u64, u64) {
        let Error::Corrupt { suspect, offset, bytes, .. } = error else { panic!("{error}") };
        (suspect, *offset, *bytes)
    }

    #[test]
    fn sums_fit_and_name_the_part() {
        for collective in [Collective::AllReduce, Collective::AllGather, Collective::AllToAll, Collective::Reduce] {
            for ranks in 2..=8 {
                for count in [1, 1000, 1 << 20] {
                    let chose = chose(collective, count, ranks);
                    assert!(chose.words() <= MOST_OF_RANK && chose.words() * ranks <= MOST, "{chose:?}");
                }
            }
        }
        // 4 MiB in 64 parts: rank 2's result differs from its repetition in part 5.
        let three = chose(Collective::AllReduce, 1 << 20, 3);
        let mut table = vec![1; 3 * three.words()];
        table[2 * three.words() + three.parts + 5] = 2;
        assert_eq!(suspect(&three.judge(0, &table)), (&Suspect::Memory { rank: 2 }, 5 << 16, 1 << 16));
        // Rank 1's input has changed during the call, and all results with it.
        let mut table = vec![1; 3 * three.words()];
        (0..3).for_each(|r| table[r * three.words() + three.parts + 5] = 2);
        table[2 * three.words() - 1] = 9;
        assert_eq!(suspect(&three.judge(0, &table)).0, &Suspect::Memory { rank: 1 });
        // Every rank has a result of its own.
        let scattered = chose(Collective::ReduceScatter, 1 << 20, 2);
        let words = scattered.words();
        let mut table: Vec<u64> = (0..2 * words).map(|i| if i < words { 1 } else { 5 }).collect();
        table[words + scattered.parts + 9] = 6;
        assert_eq!(suspect(&scattered.judge(0, &table)), (&Suspect::Memory { rank: 1 }, 9 << 16, 1 << 16));
        let gathered = chose(Collective::AllGather, 1 << 10, 2);
        let mut table = vec![1; 2 * gathered.words()];
        table[gathered.words() + 1] = 2;
        let error = gathered.judge(1, &table);
        assert!(matches!(suspect(&error).0, Suspect::Link { from: 0, to: 1, .. }), "{error}");
    }
}
