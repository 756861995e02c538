//! The MLP's first matrix and its GELU: one product with an epilogue of cuBLASLt where that has one, so that the widest
//! activations cross the memory once less in each direction; else a product and a kernel.

use std::ffi::c_void;

use anyhow::{Result, anyhow};
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;

use super::device::Gpu;
use super::kernels::{Arg, Grid};
use super::memory::Array;
use super::network::Network;
use crate::params::{Tensor, index};

const WORKSPACE: usize = 32 << 20;

impl Network {
    /// `hidden = ln2 · weightᵀ` and `activated = gelu(hidden)` of a block.
    pub(super) fn gelu_forward(&self, layer: usize) -> Result<()> {
        let (c, b) = (self.config.channels, &self.blocks[layer]);
        let weight = self.block_weight(layer, Tensor::MlpIn);
        if let Some(fused) = &self.gelu {
            return fused.forward.run(fused, &self.gpu, weight, b.ln2.at(), b.activated.at(), b.hidden.at());
        }
        self.linear(&b.hidden, &b.ln2, weight, 4 * c, c)?;
        let eighths = self.rows() * 4 * c / 8;
        self.launch("gelu_forward", Grid::each(eighths), &[
            Arg::At(b.activated.at()),
            Arg::At(b.hidden.at()),
            Arg::U32(eighths as u32),
        ])
    }

    /// `dhidden = (branch · weight) * gelu'(hidden)` with the MLP's second matrix.
    pub(super) fn gelu_backward(&self, layer: usize) -> Result<()> {
        let (c, hidden) = (self.config.channels, &self.blocks[layer].hidden);
        let tensor = index(layer, Tensor::MlpOut);
        if let Some(fused) = &self.gelu {
            let (weight, dy) = (self.weight(tensor), self.branch.at());
            return fused.backward.run(fused, &self.gpu, weight, dy, self.dhidden.at(), hidden.at());
        }
        self.linear_input(&self.dhidden, &self.branch, tensor, (c, 4 * c))?;
        let eighths = self.rows() * 4 * c / 8;
        self.launch("gelu_backward", Grid::each(eighths), &[
            Arg::At(self.dhidden.at()),
            Arg::At(hidden.at()),
            Arg::U32(eighths as u32),
        ])
    }
}

/// The two products with their epilogues, for bfloat16.
#[derive(Debug)]
pub(super) struct FusedGelu {
    handle: sys::cublasLtHandle_t,
    workspace: Array<u8>,
    forward: Product,
    backward: Product,
}

/// `out[rows, 4C] = epilogue(x[rows, C] · matrix[C, 4C])`. To cuBLAS, which counts columns first: out is 4C x rows.
#[derive(Debug)]
struct Product {
    desc: sys::cublasLtMatmulDesc_t,
    weight: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl FusedGelu {
    /// Nothing where the library is missing or has no such product.
    pub(super) fn new(gpu: &Gpu, rows: usize, channels: usize) -> Option<FusedGelu> {
        // SAFETY: only tries to load the library.
        if !unsafe { sys::is_culib_present() } {
            return None;
        }
        let made = || -> Result<FusedGelu> {
            let workspace = Array::new(gpu, WORKSPACE)?;
            let handle = result::create_handle().map_err(failed)?;
            use sys::cublasLtEpilogue_t::{CUBLASLT_EPILOGUE_DGELU, CUBLASLT_EPILOGUE_GELU_AUX};
            // The first matrix lies as [4C, C], the second as [C, 4C].
            let forward = Product::new(handle, &workspace, CUBLASLT_EPILOGUE_GELU_AUX, true, rows, channels)?;
            let backward = Product::new(handle, &workspace, CUBLASLT_EPILOGUE_DGELU, false, rows, channels)?;
            Ok(FusedGelu { handle, workspace, forward, backward })
        };
        made().inspect_err(|e| log::info!("GELU gets kernels of its own: {e:#}")).ok()
    }
}

impl Product {
    fn new(
        handle: sys::cublasLtHandle_t,
        workspace: &Array<u8>,
        epilogue: sys::cublasLtEpilogue_t,
        transposed: bool,
        rows: usize,
        channels: usize,
    ) -> Result<Product> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let bf16 = sys::cudaDataType_t::CUDA_R_16BF;
        let (wide, c) = (4 * channels as u64, channels as u64);
        let layout = |rows: u64, columns: u64| {
            result::create_matrix_layout(bf16, rows, columns, rows as i64).map_err(failed)
        };
        let weight = if transposed { layout(c, wide)? } else { layout(wide, c)? };
        let (x, out) = (layout(c, rows as u64)?, layout(wide, rows as u64)?);
        let desc =
            result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType_t::CUDA_R_32F)
                .map_err(failed)?;
        if transposed {
            set(desc, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &cudarc::cublas::sys::cublasOperation_t::CUBLAS_OP_T)?;
        }
        set(desc, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
        set(desc, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &(wide as i64))?;
        // Any aligned address, as all arrays are.
        set(desc, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &workspace.at())?;
        let preference = result::create_matmul_pref().map_err(failed)?;
        // SAFETY: all of these were just made; the attribute is of that size.
        let chosen = unsafe {
            let most = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            let bytes = WORKSPACE;
            let chosen = result::set_matmul_pref_attribute(preference, most, (&raw const bytes).cast(), size_of_val(&bytes))
                .and_then(|()| result::get_matmul_algo_heuristic(handle, desc, weight, x, out, out, preference));
            let _ = result::destroy_matmul_pref(preference);
            chosen
        };
        Ok(Product { desc, weight, x, out, algorithm: chosen.map_err(failed)?.algo })
    }

    /// Enqueues it; `before` is what the epilogue keeps of, or reads for, the backward pass.
    fn run(&self, fused: &FusedGelu, gpu: &Gpu, weight: u64, x: u64, out: u64, before: u64) -> Result<()> {
        set(self.desc, sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &before)?;
        let (one, zero) = (1.0f32, 0.0f32);
        // SAFETY: arrays of these shapes, which live as long as the network; the factors are read before the call returns.
        unsafe {
            result::matmul(
                fused.handle,
                self.desc,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                weight as *const c_void,
                self.weight,
                x as *const c_void,
                self.x,
                out as *const c_void,
                self.out,
                out as *mut c_void,
                self.out,
                &raw const self.algorithm,
                fused.workspace.at() as *mut c_void,
                WORKSPACE,
                gpu.stream.cu_stream().cast(),
            )
        }
        .map_err(failed)
    }
}

fn set<T>(desc: sys::cublasLtMatmulDesc_t, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<()> {
    // SAFETY: the description is alive; the library copies that many bytes of the value.
    unsafe { result::set_matmul_desc_attribute(desc, attribute, std::ptr::from_ref(value).cast(), size_of::<T>()) }
        .map_err(failed)
}

fn failed(error: CublasError) -> anyhow::Error {
    anyhow!("cuBLASLt cannot multiply with GELU: {:?}", error.0)
}

impl Drop for FusedGelu {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once; the network waits for its streams before.
        unsafe {
            for product in [&self.forward, &self.backward] {
                let _ = result::destroy_matmul_desc(product.desc);
                for layout in [product.weight, product.x, product.out] {
                    let _ = result::destroy_matrix_layout(layout);
                }
            }
            let _ = result::destroy_handle(self.handle);
        }
    }
}
