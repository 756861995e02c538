//! Matrix products by cuBLAS. Matrices are row-major here; cuBLAS counts columns first, so it computes the transpose of
//! each product from the transposes of its operands, which is the same memory.

use std::ffi::c_void;
use std::fmt::Display;

use anyhow::{Result, anyhow};
use cudarc::cublas::result::{self, CublasError};
use cudarc::cublas::sys;

use super::Precision;
use super::device::{Address, Array, Gpu, failed};

/// Bytes of cuBLAS' workspace, as NVIDIA advises for Hopper. Given once, so that products can be captured into a graph.
const WORKSPACE: usize = 32 << 20;

/// A matrix that is multiplied, transposed or not.
#[derive(Debug, Clone, Copy)]
pub struct Operand {
    at: Address,
    stride: usize,
    transposed: bool,
}

impl Operand {
    /// A matrix whose rows are `stride` values apart.
    pub fn new(at: impl Into<Address>, stride: usize) -> Operand {
        Operand { at: at.into(), stride, transposed: false }
    }

    /// Its transpose.
    pub fn t(self) -> Operand {
        Operand { transposed: !self.transposed, ..self }
    }
}

/// Destination of a product.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    /// Address.
    pub at: Address,
    /// Distance of rows, in values.
    pub stride: usize,
    /// f32, whatever the operands are.
    pub wide: bool,
    /// Factor on the product.
    pub scale: f32,
    /// True if the product is added to the values that are there.
    pub add: bool,
}

impl Output {
    /// In the type of activations.
    pub fn new(at: impl Into<Address>, stride: usize) -> Output {
        Output { at: at.into(), stride, wide: false, scale: 1.0, add: false }
    }

    /// In f32.
    pub fn wide(at: impl Into<Address>, stride: usize) -> Output {
        Output { wide: true, ..Output::new(at, stride) }
    }
}

/// A batch of products: how many, and the distances of left operands, right operands and outputs, in values.
#[derive(Debug, Clone, Copy)]
pub struct Batch {
    /// Products.
    pub count: usize,
    /// Distance of left operands.
    pub left: usize,
    /// Distance of right operands.
    pub right: usize,
    /// Distance of outputs.
    pub out: usize,
}

/// cuBLAS on one stream.
pub struct Blas {
    handle: sys::cublasHandle_t,
    precision: Precision,
    workspace: Array<u8>,
}

impl Blas {
    /// Opens the library for the passes' stream.
    pub fn new(gpu: &Gpu, precision: Precision) -> Result<Blas> {
        let workspace = Array::new(gpu, WORKSPACE)?;
        gpu.context.bind_to_thread().map_err(failed("cannot use the GPU"))?;
        let handle = result::create_handle().map_err(blas("cannot be started"))?;
        let created = Blas { handle, precision, workspace };
        let at = created.workspace.place(0).0 as *mut c_void;
        // SAFETY: the handle is fresh, the stream outlives it, the workspace is that long and is freed after the
        // handle.
        let set = unsafe {
            result::set_stream(handle, gpu.stream.cu_stream().cast())
                .and_then(|()| sys::cublasSetWorkspace_v2(handle, at, WORKSPACE).result())
        };
        set.map_err(blas("does not take the stream and the workspace"))?;
        Ok(created)
    }

    /// `out[m, n] = left[m, k] · right[k, n]`. As with kernels, addresses are on the caller.
    pub fn multiply(&self, out: Output, (m, n, k): (usize, usize, usize), left: Operand, right: Operand) -> Result<()> {
        self.multiply_batch(out, (m, n, k), left, right, Batch { count: 1, left: 0, right: 0, out: 0 })
    }

    /// [`Blas::multiply`] for several of the same shape.
    pub fn multiply_batch(
        &self,
        out: Output,
        (m, n, k): (usize, usize, usize),
        left: Operand,
        right: Operand,
        batch: Batch,
    ) -> Result<()> {
        let narrow = match self.precision {
            Precision::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
            _ => sys::cudaDataType_t::CUDA_R_32F,
        };
        let wide = if out.wide { sys::cudaDataType_t::CUDA_R_32F } else { narrow };
        let compute = match self.precision {
            Precision::Tf32 => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            _ => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let op = |operand: Operand| match operand.transposed {
            true => sys::cublasOperation_t::CUBLAS_OP_T,
            false => sys::cublasOperation_t::CUBLAS_OP_N,
        };
        let (alpha, beta) = (out.scale, if out.add { 1.0f32 } else { 0.0 });
        let (alpha, beta) = ((&raw const alpha).cast(), (&raw const beta).cast());
        let algorithm = sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP;
        let (m, n, k) = (m as i32, n as i32, k as i32);
        let (a, b, c) = (right.at.0 as *const c_void, left.at.0 as *const c_void, out.at.0 as *mut c_void);
        let (lda, ldb, ldc) = (right.stride as i32, left.stride as i32, out.stride as i32);
        // SAFETY: operands and output are device arrays of those shapes, as the caller guarantees; alpha and beta are
        // read before the call returns.
        let done = unsafe {
            if batch.count == 1 {
                result::gemm_ex(
                    self.handle,
                    op(right),
                    op(left),
                    n,
                    m,
                    k,
                    alpha,
                    a,
                    narrow,
                    lda,
                    b,
                    narrow,
                    ldb,
                    beta,
                    c,
                    wide,
                    ldc,
                    compute,
                    algorithm,
                )
            } else {
                result::gemm_strided_batched_ex(
                    self.handle,
                    op(right),
                    op(left),
                    n,
                    m,
                    k,
                    alpha,
                    a,
                    narrow,
                    lda,
                    batch.right as i64,
                    b,
                    narrow,
                    ldb,
                    batch.left as i64,
                    beta,
                    c,
                    wide,
                    ldc,
                    batch.out as i64,
                    batch.count as i32,
                    compute,
                    algorithm,
                )
            }
        };
        done.map_err(blas(format!("cannot multiply {m}x{k} by {k}x{n}")))
    }
}

fn blas(what: impl Display) -> impl FnOnce(CublasError) -> anyhow::Error {
    move |error| anyhow!("cuBLAS {what}: {:?}", error.0)
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}
