//! Checks the buffers of a call before a kernel accesses them: a wrong address in a kernel destroys the whole context.

use std::ops::Range;

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUpointer_attribute as Attribute};

use crate::driver::{cuda, is_capturing};
use tinynccl_comm::RawCall;
use tinynccl_plan::algorithm::Shape;
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::Collective;

/// Memory is mapped in multiples of this at least.
const PAGE: u64 = 2 << 20;

/// One buffer that a rank reads or writes in a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Buffer {
    /// Name of its parameter.
    pub(crate) name: &'static str,
    pub(crate) at: u64,
    pub(crate) bytes: u64,
    /// Bytes of an element.
    pub(crate) element: u64,
}

impl Buffer {
    fn end(&self) -> u64 {
        self.at.saturating_add(self.bytes)
    }

    /// Address of the last byte.
    fn last(&self) -> u64 {
        self.end().saturating_sub(1)
    }

    /// True if the buffer lies in several pages, which may be mapped one by one.
    fn crosses_pages(&self) -> bool {
        self.at / PAGE != self.last() / PAGE
    }

    pub(crate) fn overlaps(&self, other: &Buffer) -> bool {
        self.at < other.end() && other.at < self.end()
    }
}

/// CUDA's information about an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Memory {
    kind: Kind,
    /// The allocation around it.
    begin: u64,
    bytes: u64,
    device: i32,
    /// True if kernels of the querying device may use it.
    reachable: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Unknown to CUDA: pageable, freed, or unmapped.
    Unknown,
    Host,
    Device,
}

/// The input and output that `rank` uses in a collective of `size` ranks; `None` for one that is ignored, or empty.
///
/// # Errors
/// [`Error::InvalidArgument`] for more bytes than the address space has, for addresses that are not aligned to an
/// element, and for an input and an output that overlap other than in place.
pub(crate) fn of(call: &RawCall, rank: usize, size: usize) -> Result<[Option<Buffer>; 2]> {
    let op = call.collective.name();
    let element = call.dtype.size() as u64;
    let too_large = || {
        let (count, dtype) = (call.count, call.dtype);
        Error::invalid(op, format!("{count} elements of {dtype} on {size} ranks are more than memory holds"))
    };
    let whole = (call.count as u64)
        .checked_mul(element * size as u64)
        .filter(|&bytes| bytes < 1 << 48)
        .ok_or_else(too_large)?;
    let part = whole / size as u64;
    let at = call.device_addresses();
    let shape = Shape { collective: call.collective, ranks: size, root: call.root, channels: 1 };
    let inputs = part * shape.input_segments(rank) as u64;
    let outputs = part * shape.output_segments(rank) as u64;
    let buffer = |name, at, bytes| (bytes > 0).then_some(Buffer { name, at, bytes, element });
    let used = [buffer("input", at.0, inputs), buffer("output", at.1, outputs)];
    for buffer in used.iter().flatten() {
        aligned(op, rank, buffer)?;
    }
    if let [Some(input), Some(output)] = &used {
        let own = rank as u64 * part;
        let same = match call.collective {
            Collective::AllGather | Collective::Gather => input.at == output.at + own,
            Collective::ReduceScatter | Collective::Scatter => output.at == input.at + own,
            _ => input.at == output.at,
        };
        if !same && input.overlaps(output) {
            let detail = format!(
                "rank {rank}: the input at {:#x} ({} bytes) and the output at {:#x} ({} bytes) overlap; expected {}",
                input.at,
                input.bytes,
                output.at,
                output.bytes,
                match call.collective {
                    Collective::AllGather | Collective::Gather =>
                        "separate ones, or the input at its place in the output",
                    Collective::ReduceScatter | Collective::Scatter =>
                        "separate ones, or the output at its place in the input",
                    _ => "separate ones, or the same",
                }
            );
            return Err(Error::invalid(op, detail));
        }
    }
    Ok(used)
}

pub(crate) fn aligned(op: &str, rank: usize, buffer: &Buffer) -> Result<()> {
    let Buffer { name, at, element, .. } = *buffer;
    if at.is_multiple_of(element) {
        return Ok(());
    }
    let detail = format!(
        "rank {rank}: the {name} at {at:#x} begins {} bytes into an element of {element}: expected a multiple of {element}; \
         give the address of an element",
        at % element
    );
    Err(Error::invalid(op, detail))
}

/// Checks with CUDA that the rank's device reaches all of each buffer. Not while `stream` is captured: memory that a
/// graph allocates may not exist yet.
#[inline]
pub(crate) fn check(
    op: &str,
    rank: usize,
    context: &CudaContext,
    stream: sys::CUstream,
    buffers: &[Option<Buffer>],
) -> Result<()> {
    let device = context.ordinal() as i32;
    // Of a call in place one is enough.
    let buffers = match buffers {
        [Some(one), Some(other)] if (one.at, one.bytes) == (other.at, other.bytes) => &buffers[..1],
        all => all,
    };
    for buffer in buffers.iter().flatten() {
        let ours = |at| ask_range(at).is_some_and(|(owner, range)| owner == device && buffer.end() <= range.end);
        if !ours(buffer.at) || (buffer.crosses_pages() && !ours(buffer.last())) {
            check_slowly(op, rank, context, stream, buffer)?;
        }
    }
    Ok(())
}

#[cold]
fn check_slowly(op: &str, rank: usize, context: &CudaContext, stream: sys::CUstream, buffer: &Buffer) -> Result<()> {
    // The answers depend on the thread's current context; without one there is none.
    context.bind_to_thread().map_err(|e| cuda(op, "binding the device to this thread", e))?;
    let Some(memory) = ask(buffer.at) else { return Ok(()) };
    let last = ask(buffer.last());
    let verdict = judge(op, rank, context.ordinal(), buffer, &memory, last.as_ref());
    // SAFETY: a stream, by the contract of `enqueue`.
    if verdict.is_err() && unsafe { is_capturing(stream) }.unwrap_or(true) { Ok(()) } else { verdict }
}

/// The device that owns the memory at an address, and the allocation around it; `None` if there is none.
fn ask_range(at: u64) -> Option<(i32, Range<u64>)> {
    let (mut device, mut begin, mut bytes) = (-1i32, 0u64, 0usize);
    let mut attributes = [
        Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
    ];
    let mut places = [(&raw mut device).cast(), (&raw mut begin).cast(), (&raw mut bytes).cast()];
    // SAFETY: one place of the attribute's type for each; any address may be asked for.
    let asked = unsafe { sys::cuPointerGetAttributes(3, attributes.as_mut_ptr(), places.as_mut_ptr(), at) };
    asked.result().ok()?;
    Some((device, begin..begin.saturating_add(bytes as u64)))
}

/// The driver's information about an address, from this thread's device; `None` if it does not answer.
fn ask(at: u64) -> Option<Memory> {
    let (mut kind, mut begin, mut bytes, mut device, mut seen) = (0u32, 0u64, 0usize, -1i32, 0u64);
    let mut attributes = [
        Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        // (ACCESS_FLAGS describes the owner's access, not ours: driver 580.)
        Attribute::CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
    ];
    let mut places = [
        (&raw mut kind).cast(),
        (&raw mut begin).cast(),
        (&raw mut bytes).cast(),
        (&raw mut device).cast(),
        (&raw mut seen).cast(),
    ];
    // SAFETY: as above.
    let asked = unsafe {
        sys::cuPointerGetAttributes(attributes.len() as u32, attributes.as_mut_ptr(), places.as_mut_ptr(), at)
    };
    asked.result().ok()?;
    let kind = match kind {
        1 => Kind::Host,
        // Arrays and managed memory too.
        2.. => Kind::Device,
        _ => Kind::Unknown,
    };
    Some(Memory { kind, begin, bytes: bytes as u64, device, reachable: seen == at })
}

/// Checks that a buffer, which begins in `memory` and ends in `last`, can be used by `rank` on GPU `device`.
fn judge(op: &str, rank: usize, device: usize, buffer: &Buffer, memory: &Memory, last: Option<&Memory>) -> Result<()> {
    let Buffer { name, at, bytes, .. } = *buffer;
    let wrong = |what: String| {
        let detail = format!(
            "rank {rank}: the {name} at {at:#x} is {what}; expected {bytes} bytes of memory that GPU {device} reaches"
        );
        Err(Error::invalid(op, detail))
    };
    match memory.kind {
        Kind::Unknown => {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
            return wrong(match host_mapping(&maps, at) {
                Some(place) => format!("memory of the host ({place}): pass device memory or page-locked memory"),
                None => "memory unknown to CUDA: freed, or never allocated".to_owned(),
            });
        }
        Kind::Device if memory.device != device as i32 && !memory.reachable => {
            let other = memory.device;
            return wrong(format!(
                "memory of GPU {other}, to which GPU {device} has no access: allocate it on GPU {device}, or enable peer access"
            ));
        }
        _ => {}
    }
    let end = memory.begin.saturating_add(memory.bytes);
    if end < buffer.end() {
        return wrong(format!("{} bytes from the end of its allocation of {} bytes", end - at, memory.bytes));
    }
    // For memory that was mapped piece by piece, the range is the whole reservation.
    if let Some(last) = last
        && (last.kind, last.device) != (memory.kind, memory.device)
    {
        return wrong(format!("memory that is not mapped to its end: nothing is at {:#x}", buffer.last()));
    }
    Ok(())
}

/// The process's mapping at an address, if it is readable: CUDA's own reservations are not.
fn host_mapping(maps: &str, at: u64) -> Option<String> {
    maps.lines().find_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let (begin, end) = fields.next()?.split_once('-')?;
        let range = u64::from_str_radix(begin, 16).ok()?..u64::from_str_radix(end, 16).ok()?;
        if !range.contains(&at) || !fields.next()?.starts_with('r') {
            return None;
        }
        Some(fields.nth(3).unwrap_or("anonymous memory").to_owned()).filter(|path| !path.starts_with("/dev/nvidia"))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use tinynccl_plan::Call;
    use tinynccl_plan::{DType, ReduceOp};

    fn call(collective: Collective, dtype: DType, count: usize, input: u64, output: u64) -> RawCall {
        RawCall::on_device(Call::new(collective, dtype, ReduceOp::Sum, 1, count), input, output)
    }

    fn text<T: std::fmt::Debug>(result: Result<T>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn a_rank_uses_what_its_part_in_the_collective_says() {
        let bytes = |collective, rank| {
            of(&call(collective, DType::F32, 10, 4096, 8192), rank, 3).unwrap().map(|b| b.map_or(0, |b| b.bytes))
        };
        assert_eq!(bytes(Collective::AllReduce, 0), [40, 40]);
        assert_eq!(bytes(Collective::AllGather, 0), [40, 120]);
        assert_eq!(bytes(Collective::ReduceScatter, 0), [120, 40]);
        assert_eq!(bytes(Collective::AllToAll, 0), [120, 120]);
        assert_eq!((bytes(Collective::Broadcast, 1), bytes(Collective::Broadcast, 0)), ([40, 40], [0, 40]));
        assert_eq!((bytes(Collective::Reduce, 1), bytes(Collective::Reduce, 0)), ([40, 40], [40, 0]));
        assert_eq!((bytes(Collective::Gather, 1), bytes(Collective::Gather, 0)), ([40, 120], [40, 0]));
        assert_eq!((bytes(Collective::Scatter, 1), bytes(Collective::Scatter, 0)), ([120, 40], [0, 40]));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let error = text(of(&call(Collective::AllReduce, DType::F32, usize::MAX, 0, 0), 0, 2));
        assert!(error.contains("more than memory holds"), "{error}");
        let error = text(of(&call(Collective::AllGather, DType::F32, usize::MAX / 4, 0, 0), 0, 2));
        assert!(error.contains("more than memory holds"), "{error}");
        let error = text(of(&call(Collective::AllReduce, DType::F32, 10, 4096, 8194), 3, 4));
        assert_eq!(
            error,
            "all_reduce: rank 3: the output at 0x2002 begins 2 bytes into an element of 4: expected a multiple of 4; give the \
             address of an element"
        );
        // An empty buffer may be anywhere.
        assert!(of(&call(Collective::AllReduce, DType::F64, 0, 1, 3), 0, 2).is_ok());
        let error = text(of(&call(Collective::AllReduce, DType::F32, 10, 4096, 4096 + 36), 0, 2));
        assert!(
            error.contains("the input at 0x1000 (40 bytes) and the output at 0x1024 (40 bytes) overlap"),
            "{error}"
        );
    }

    #[test]
    fn in_place_is_at_the_segments_place() {
        let ok =
            |collective, rank, input, output| of(&call(collective, DType::F32, 10, input, output), rank, 3).is_ok();
        assert!(ok(Collective::AllGather, 2, 4096 + 80, 4096) && !ok(Collective::AllGather, 2, 4096, 4096));
        assert!(ok(Collective::ReduceScatter, 1, 4096, 4096 + 40) && !ok(Collective::ReduceScatter, 1, 4096, 4096));
        assert!(ok(Collective::Gather, 1, 4096 + 40, 4096) && !ok(Collective::Gather, 1, 4096, 4096));
        assert!(ok(Collective::Scatter, 1, 4096, 4096 + 40) && !ok(Collective::Scatter, 1, 4096, 4096));
        assert!(ok(Collective::Gather, 0, 4096, 4096) && ok(Collective::Scatter, 0, 4096, 4096));
        assert!(ok(Collective::Broadcast, 1, 4096, 4096) && ok(Collective::AllToAll, 1, 4096, 4096));
    }

    proptest! {
        #[test]
        fn buffers_side_by_side_never_overlap(count in 0usize..1000, rank in 0usize..8, gap in 0u64..64) {
            for collective in Collective::ALL {
                let call = |output| call(collective, DType::U8, count, 1 << 20, output);
                let [input, _] = of(&call(1 << 40), rank, 8).unwrap();
                let behind = input.map_or(1 << 20, |b| b.end()) + gap;
                let beside = of(&call(behind), rank, 8);
                prop_assert!(beside.is_ok());
            }
        }
    }

    const BUFFER: Buffer = Buffer { name: "input", at: 0x7000_1000, bytes: 0x2000, element: 4 };
    const MEMORY: Memory = Memory { kind: Kind::Device, begin: 0x7000_0000, bytes: 0x3000, device: 0, reachable: true };

    fn judged(memory: Memory) -> Result<()> {
        judge("all_reduce", 2, 0, &BUFFER, &memory, Some(&memory))
    }

    #[test]
    fn memory_of_the_device_is_taken_to_its_end() {
        judged(MEMORY).unwrap();
        judged(Memory { kind: Kind::Host, device: -1, ..MEMORY }).unwrap();
        judged(Memory { device: 1, ..MEMORY }).unwrap();
        assert_eq!(
            text(judged(Memory { bytes: 0x2800, ..MEMORY })),
            "all_reduce: rank 2: the input at 0x70001000 is 6144 bytes from the end of its allocation of 10240 bytes; expected 8192 \
             bytes of memory that GPU 0 reaches"
        );
        let nothing = Memory { kind: Kind::Unknown, device: -2, ..MEMORY };
        let error = text(judge("all_reduce", 2, 0, &BUFFER, &MEMORY, Some(&nothing)));
        assert!(error.contains("not mapped to its end: nothing is at 0x70002fff"), "{error}");
    }

    #[test]
    fn other_memory_is_named() {
        let error = text(judged(Memory { device: 3, reachable: false, ..MEMORY }));
        assert!(error.contains("the input at 0x70001000 is memory of GPU 3, to which GPU 0 has no access"), "{error}");
        let unknown = Memory { kind: Kind::Unknown, ..MEMORY };
        let error = text(judged(unknown));
        assert!(error.contains("memory unknown to CUDA: freed, or never allocated"), "{error}");
        let ours = [0u8; 64];
        let here = Buffer { at: ours.as_ptr() as u64, ..BUFFER };
        let error = text(judge("all_reduce", 2, 0, &here, &unknown, None));
        assert!(error.contains("memory of the host ("), "{error}");
    }

    #[test]
    fn mappings_of_the_host_are_found() {
        let maps = "7f00-7f10 rw-p 00000000 00:00 0          [heap]\n\
                    8000-9000 ---p 00000000 00:00 0 \n\
                    9000-a000 rw-s 00000000 00:05 77         /dev/nvidiactl\n\
                    b000-c000 r--p 00000000 00:00 0 \n";
        assert_eq!(host_mapping(maps, 0x7f08).as_deref(), Some("[heap]"));
        assert_eq!(host_mapping(maps, 0xb000).as_deref(), Some("anonymous memory"));
        for at in [0x7f10, 0x8000, 0x9000, 0xc000] {
            assert_eq!(host_mapping(maps, at), None, "{at:#x}");
        }
    }
}
