//! `ncclRedOpCreatePreMulSum`: sums of inputs that each rank multiplies by its own factor.
//!
//! A kernel multiplies the input, as `avg` does (`times` in the library's `types.cuh`), then a collective sums. The
//! products go into the output where this rank has one of the input's shape, otherwise into stream-ordered memory: an
//! input that is not the output stays as it is. Both are captured with the stream.

use std::ffi::{c_int, c_void};

use cudarc::driver::{CudaFunction, DriverError, result, sys};
use tinynccl::comm::RawCall;
use tinynccl::cuda::{self, DeviceComm, Uncaptured};
use tinynccl::wire::Collective;
use tinynccl::{Call, DType, ReduceOp};

use crate::abi::error::{Error, Result};
use crate::abi::export::{export, out};
use crate::abi::{self, NUM_OPS};
use crate::comm::communicator::Communicator;
use crate::comm::gpu::Current;
use crate::comm::handle::{Handle, handle};
use crate::comm::operators::{Factor, Scale};

const THREADS: u32 = 512;
/// Blocks at most: enough for the memory's bandwidth.
const BLOCKS: u64 = 1024;

/// Returns the scale of a custom operator, for a call with elements of `dtype`.
///
/// # Errors
/// `ncclInvalidArgument` for an operator that was not created on `comm`, or was created for another type.
pub(crate) fn operator(op: c_int, comm: &Communicator, dtype: DType) -> Result<Scale> {
    let scale = comm.operators().get(op).ok_or_else(|| unknown(op, comm))?;
    if scale.dtype != dtype {
        let made_for = scale.dtype;
        return Err(Error::argument(format!(
            "op {op} multiplies {made_for}, and the call is of {dtype}: make one for {dtype}"
        )));
    }
    Ok(scale)
}

fn unknown(op: c_int, comm: &Communicator) -> Error {
    Error::argument(format!(
        "op is {op}, expected one below {NUM_OPS}, or one that ncclRedOpCreatePreMulSum has made of communicator {} \
         and that is not destroyed",
        comm.name()
    ))
}

/// Returns name, text and definitions of the kernel's unit.
fn unit(dtype: DType) -> (String, String, Vec<String>) {
    let defines = vec![format!("-DDTYPE={}", dtype as u8), "-DOP=0".to_owned(), "-DRANKS=1".to_owned()];
    (format!("pre_mul_sum.cu of {dtype}"), [cuda::ELEMENTS, include_str!("pre_mul_sum.cu")].concat(), defines)
}

/// Loads the kernel when an operator is created, not at the first call: loading can wait for kernels that run, and
/// those of one rank of this thread may already wait for those of another.
fn load(device: &DeviceComm, dtype: DType) -> Result<CudaFunction> {
    let context = device.context();
    let failed = |e: DriverError| Error::cuda("loading the kernel that multiplies", e);
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
        let failed = |e: DriverError| Error::cuda("launching the kernel that multiplies", e);
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
        let comm = handle(comm)?;
        let device = comm.device()?;
        let (_current, _uncaptured) = (Current::enter(device.context())?, Uncaptured::begin());
        let dtype = abi::dtype(datatype)?;
        if scalar.is_null() {
            return Err(Error::argument(format!("scalar is NULL, expected the address of one {dtype}")));
        }
        let factor = match residence {
            abi::SCALAR_DEVICE => Factor::At(scalar as u64),
            abi::SCALAR_HOST => {
                let mut bytes = [0; 8];
                // SAFETY: the caller's scalar, an element of this type; at most 8 bytes.
                unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(scalar.cast(), dtype.size()) };
                Factor::Value(bytes)
            }
            other => return Err(Error::argument(format!(
                "residence is {other}, expected {} (ncclScalarDevice) or {} (ncclScalarHostImmediate)",
                abi::SCALAR_DEVICE, abi::SCALAR_HOST
            ))),
        };
        let operators = comm.operators();
        let kernel = operators.kernel(dtype, || load(device, dtype))?;
        *op = operators.insert(Scale { dtype, factor, kernel });
        Ok(())
    }

    /// Destroys an operator of `ncclRedOpCreatePreMulSum`; calls made with it before are not affected.
    fn ncclRedOpDestroy / pncclRedOpDestroy [comm] (op: c_int, comm: Handle) {
        let comm = handle(comm)?;
        if abi::operator(op).is_some() {
            return Err(Error::argument(format!("op is {op}, a built-in operator, which cannot be destroyed")));
        }
        if comm.operators().remove(op) { Ok(()) } else { Err(unknown(op, &comm)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::config::Options;
    use crate::abi::{Status, TYPES};

    #[test]
    fn products_go_where_they_may() {
        assert!(into_output(Collective::AllReduce, false, 4));
        assert!(into_output(Collective::Reduce, true, 4) && !into_output(Collective::Reduce, false, 4));
        assert!(!into_output(Collective::ReduceScatter, true, 4) && into_output(Collective::ReduceScatter, true, 1));
    }

    #[test]
    fn an_operator_that_does_not_exist_is_named() {
        let comm = Communicator::starting(Options::standard(), 0, Some((0, 2)));
        let error = operator(77, &comm, DType::F32).unwrap_err();
        assert_eq!(error.status, Status::InvalidArgument);
        assert!(error.text.contains("op is 77") && error.text.contains(comm.name()), "{}", error.text);
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
