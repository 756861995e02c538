//! `ncclRedOpCreatePreMulSum`: sums of inputs that each rank multiplies by its own factor.
//!
//! A kernel multiplies the input, as `avg` does (`times` in the library's `types.cuh`), then a collective sums. The
//! products go into the output where this rank has one of the input's shape, otherwise into stream-ordered memory: an
//! input that is not the output stays as it is. Both are captured with the stream.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::{CudaFunction, DriverError, result, sys};
use tinynccl::comm::RawCall;
use tinynccl::cuda::{self, DeviceComm, Uncaptured};
use tinynccl::wire::Collective;
use tinynccl::{Call, DType, ReduceOp};

use crate::abi::{self, NUM_OPS};
use crate::export::{export, out};
use crate::fault::{Fault, Result};
use crate::gpu::Current;
use crate::handle::{Handle, handle};
use crate::member::Member;

const THREADS: u32 = 512;
/// Blocks at most: enough for the memory's bandwidth.
const BLOCKS: u64 = 1024;

/// A factor, and the kernel that multiplies by it. Collectives keep a copy: callers may destroy the operator as soon as
/// the call has returned, inside a group too.
#[derive(Debug, Clone)]
pub(crate) struct Scale {
    dtype: DType,
    factor: Factor,
    kernel: CudaFunction,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Factor {
    /// The bytes of an element, in memory order.
    Value([u8; 8]),
    /// Its address on the device, read when the call runs.
    At(u64),
}

/// The custom operators of a communicator, and their kernels.
#[derive(Debug, Default)]
pub(crate) struct Operators {
    live: Mutex<HashMap<c_int, Scale>>,
    kernels: Mutex<HashMap<DType, CudaFunction>>,
}

impl Operators {
    fn live(&self) -> MutexGuard<'_, HashMap<c_int, Scale>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kernel(&self, device: &DeviceComm, dtype: DType) -> Result<CudaFunction> {
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        match kernels.entry(dtype) {
            Entry::Occupied(found) => Ok(found.get().clone()),
            Entry::Vacant(place) => Ok(place.insert(load(device, dtype)?).clone()),
        }
    }
}

/// The scale of a custom operator, for a call with elements of `dtype`.
///
/// # Errors
/// `ncclInvalidArgument` for an operator that was not created on `member`, or was created for another type.
pub(crate) fn operator(op: c_int, member: &Member, dtype: DType) -> Result<Scale> {
    let live = member.operators().live();
    let scale = live.get(&op).ok_or_else(|| unknown(op, member))?;
    if scale.dtype != dtype {
        let made_for = scale.dtype;
        return Err(Fault::argument(format!(
            "op {op} multiplies {made_for}, and the call is of {dtype}: make one for {dtype}"
        )));
    }
    Ok(scale.clone())
}

fn unknown(op: c_int, member: &Member) -> Fault {
    Fault::argument(format!(
        "op is {op}, expected one below {NUM_OPS}, or one that ncclRedOpCreatePreMulSum has made of communicator {} and that is \
         not destroyed",
        member.name()
    ))
}

/// An operator's number that no live one has. They count through all communicators, so that one of another communicator
/// is noticed.
fn insert(live: &mut HashMap<c_int, Scale>, scale: Scale) -> c_int {
    loop {
        let number = next();
        if let Entry::Vacant(place) = live.entry(number) {
            place.insert(scale);
            return number;
        }
    }
}

fn next() -> c_int {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let span = (c_int::MAX - NUM_OPS) as u32;
    NUM_OPS + (NEXT.fetch_add(1, Ordering::Relaxed) % span) as c_int
}

/// Name, text and definitions of the kernel's unit.
fn unit(dtype: DType) -> (String, String, Vec<String>) {
    let defines = vec![format!("-DDTYPE={}", dtype as u8), "-DOP=0".to_owned(), "-DRANKS=1".to_owned()];
    (format!("scaled.cu of {dtype}"), [cuda::ELEMENTS, include_str!("scaled.cu")].concat(), defines)
}

/// Loads the kernel when an operator is created, not at the first call: loading can wait for kernels that run, and
/// those of one rank of this thread may already wait for those of another.
fn load(device: &DeviceComm, dtype: DType) -> Result<CudaFunction> {
    let context = device.context();
    let failed = |e: DriverError| Fault::cuda("loading the kernel that multiplies", e);
    let (name, text, defines) = unit(dtype);
    let ptx = cuda::compile(&name, &text, &defines, context.compute_capability().map_err(failed)?)?;
    context.bind_to_thread().map_err(failed)?;
    let kernel = context.load_module(ptx).and_then(|module| module.load_function("scale")).map_err(failed)?;
    // The driver loads a function's code when it is first used; reading an attribute is a use.
    kernel.get_attribute(sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS).map_err(failed)?;
    Ok(kernel)
}

/// Returns true if the products of this rank fit into its output.
fn into_output(collective: Collective, at_root: bool, size: usize) -> bool {
    match collective {
        Collective::AllReduce => true,
        Collective::Reduce => at_root,
        // The output is one segment of many.
        _ => size == 1,
    }
}

impl Scale {
    /// Enqueues `call`, whose operator is the sum, with the input multiplied.
    ///
    /// # Safety
    /// As [`DeviceComm::enqueue`].
    pub(crate) unsafe fn enqueue(&self, device: &DeviceComm, stream: sys::CUstream, call: &RawCall) -> Result<()> {
        // SAFETY: forwarded from the caller. Before the kernel here touches the buffers.
        unsafe { device.validate(stream, call) }?;
        let (input, output) = call.addresses();
        let (input, output) = (input as u64, output as u64);
        let size = device.size();
        let count = call.count * if call.collective == Collective::ReduceScatter { size } else { 1 };
        if count == 0 {
            // SAFETY: as above.
            return Ok(unsafe { device.enqueue(stream, call) }?);
        }
        let sum_of = |input: u64| {
            let Call { collective, dtype, root, count, .. } = **call;
            RawCall::on_device(Call::new(collective, dtype, ReduceOp::Sum, root, count), input, output)
        };
        if into_output(call.collective, call.root == device.rank(), size) {
            // SAFETY: as above: both buffers have `count` elements.
            unsafe { self.multiply(device, stream, input, output, count) }?;
            // SAFETY: as above.
            return Ok(unsafe { device.enqueue(stream, &sum_of(output)) }?);
        }
        // SAFETY: as above; the products are as long as the input, and used on the stream.
        unsafe {
            device.with_scratch(stream, count * self.dtype.size(), |products| {
                self.multiply(device, stream, input, products, count)?;
                Ok(device.enqueue(stream, &sum_of(products))?)
            })
        }
    }

    /// # Safety
    /// `from` and `to` must be `count` elements each that the device reaches until the stream has passed the kernel.
    unsafe fn multiply(
        &self,
        device: &DeviceComm,
        stream: sys::CUstream,
        from: u64,
        to: u64,
        count: usize,
    ) -> Result<()> {
        let failed = |e: DriverError| Fault::cuda("launching the kernel that multiplies", e);
        let (at, value) = match self.factor {
            Factor::Value(bytes) => (0, u64::from_le_bytes(bytes)),
            Factor::At(address) => (address, 0),
        };
        let count = count as u64;
        let bytes = count * self.dtype.size() as u64;
        let blocks = bytes.div_ceil(16 * u64::from(THREADS)).clamp(1, BLOCKS) as u32;
        let mut parameters = [&raw const from, &raw const to, &raw const count, &raw const at, &raw const value]
            .map(|one| one.cast_mut().cast::<c_void>());
        device.context().bind_to_thread().map_err(failed)?;
        // SAFETY: the kernel declares these five parameters of 8 bytes each, and the driver copies them; the caller
        // vouches for the buffers.
        unsafe {
            result::launch_kernel(
                self.kernel.cu_function(),
                (blocks, 1, 1),
                (THREADS, 1, 1),
                0,
                stream,
                &mut parameters,
            )
        }
        .map_err(failed)
    }
}

export! {
    /// Makes an operator that multiplies this rank's input by `scalar` and sums, for calls of this communicator with
    /// elements of `datatype`. `residence`: `ncclScalarHostImmediate`, the scalar is read now, or `ncclScalarDevice`,
    /// it is read when the call runs.
    fn ncclRedOpCreatePreMulSum / pncclRedOpCreatePreMulSum [comm] (
        op: *mut c_int, scalar: *mut c_void, datatype: c_int, residence: c_int, comm: Handle
    ) {
        // SAFETY: NULL or the caller's variable.
        let op = unsafe { out("op", op) }?;
        let member = handle(comm)?;
        let device = member.device()?;
        let (_current, _uncaptured) = (Current::enter(device.context())?, Uncaptured::begin());
        let dtype = abi::dtype(datatype)?;
        if scalar.is_null() {
            return Err(Fault::argument(format!("scalar is NULL, expected the address of one {dtype}")));
        }
        let factor = match residence {
            abi::SCALAR_DEVICE => Factor::At(scalar as u64),
            abi::SCALAR_HOST => {
                let mut bytes = [0; 8];
                // SAFETY: the caller's scalar, an element of this type; at most 8 bytes.
                unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(scalar.cast(), dtype.size()) };
                Factor::Value(bytes)
            }
            other => return Err(Fault::argument(format!(
                "residence is {other}, expected {} (ncclScalarDevice) or {} (ncclScalarHostImmediate)",
                abi::SCALAR_DEVICE, abi::SCALAR_HOST
            ))),
        };
        let operators = member.operators();
        let kernel = operators.kernel(device, dtype)?;
        *op = insert(&mut operators.live(), Scale { dtype, factor, kernel });
        Ok(())
    }

    /// Destroys an operator of `ncclRedOpCreatePreMulSum`; calls made with it before are not affected.
    fn ncclRedOpDestroy / pncclRedOpDestroy [comm] (op: c_int, comm: Handle) {
        let member = handle(comm)?;
        if abi::operator(op).is_some() {
            return Err(Fault::argument(format!("op is {op}, a built-in operator, which cannot be destroyed")));
        }
        match member.operators().live().remove(&op) {
            Some(_) => Ok(()),
            None => Err(unknown(op, &member)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{Status, TYPES};
    use crate::config::Options;

    #[test]
    fn products_go_where_they_may() {
        assert!(into_output(Collective::AllReduce, false, 4));
        assert!(into_output(Collective::Reduce, true, 4) && !into_output(Collective::Reduce, false, 4));
        assert!(!into_output(Collective::ReduceScatter, true, 4) && into_output(Collective::ReduceScatter, true, 1));
    }

    #[test]
    fn numbers_are_of_custom_operators_and_not_repeated() {
        let (one, other) = (next(), next());
        assert!(one >= NUM_OPS && other >= NUM_OPS && one != other);
    }

    #[test]
    fn an_operator_that_does_not_exist_is_named() {
        let member = Member::starting(Options::standard(), 0, Some((0, 2)));
        let fault = operator(77, &member, DType::F32).unwrap_err();
        assert_eq!(fault.status, Status::InvalidArgument);
        assert!(fault.text.contains("op is 77") && fault.text.contains(member.name()), "{}", fault.text);
    }

    #[test]
    fn every_type_compiles() {
        for dtype in TYPES {
            let (name, text, defines) = unit(dtype);
            match cuda::compile(&name, &text, &defines, (9, 0)) {
                Ok(_) => {}
                Err(error @ tinynccl::Error::Unsupported { .. }) => {
                    eprintln!("SKIPPED every_type_compiles: {error}");
                    return;
                }
                Err(error) => panic!("{name}: {error}"),
            }
        }
    }
}
