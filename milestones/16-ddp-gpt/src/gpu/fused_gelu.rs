//! The MLP's first matrix and its GELU as one product with an epilogue of cuBLASLt, where that has one, so that the
//! widest activations are not read once more; else [`super::forward`] takes a product and a kernel. On an H200 that is
//! 50 µs in place of 58. The backward pass stays in two: there the product with an epilogue took 84 µs, product and
//! kernel take 69.

use std::ffi::c_void;

use anyhow::{Result, anyhow};
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;

use super::device::{Address, Array, Gpu};

const WORKSPACE: usize = 32 << 20;

/// `activated[rows, 4C] = gelu(hidden)`, `hidden = x[rows, C] · weight[4C, C]ᵀ`, both kept, in bfloat16. To cuBLAS,
/// which counts columns first, outputs are 4C x rows.
pub(super) struct FusedGelu {
    handle: sys::cublasLtHandle_t,
    workspace: Array<u8>,
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
        Self::choose(gpu, rows, channels).inspect_err(|e| log::info!("GELU gets a kernel of its own: {e:#}")).ok()
    }

    fn choose(gpu: &Gpu, rows: usize, channels: usize) -> Result<FusedGelu> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let (wide, c, rows) = (4 * channels as u64, channels as u64, rows as u64);
        let bf16 = sys::cudaDataType_t::CUDA_R_16BF;
        let layout =
            |rows: u64, columns: u64| result::create_matrix_layout(bf16, rows, columns, rows as i64).map_err(failed);
        let (compute, scale) = (sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType_t::CUDA_R_32F);
        let mut fused = FusedGelu {
            workspace: Array::new(gpu, WORKSPACE)?,
            handle: result::create_handle().map_err(failed)?,
            desc: result::create_matmul_desc(compute, scale).map_err(failed)?,
            weight: layout(c, wide)?,
            x: layout(c, rows)?,
            out: layout(wide, rows)?,
            algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
        };
        fused.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &cudarc::cublas::sys::cublasOperation_t::CUBLAS_OP_T)?;
        fused.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_AUX)?;
        fused.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &(wide as i64))?;
        // Any aligned address, as all arrays are.
        fused.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &fused.workspace.place(0))?;
        let preference = result::create_matmul_pref().map_err(failed)?;
        // SAFETY: all of these were just made; the attribute is of that size.
        let chosen = unsafe {
            let most = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            let bytes = WORKSPACE;
            let FusedGelu { handle, desc, weight, x, out, .. } = fused;
            let chosen =
                result::set_matmul_pref_attribute(preference, most, (&raw const bytes).cast(), size_of_val(&bytes))
                    .and_then(|()| result::get_matmul_algo_heuristic(handle, desc, weight, x, out, out, preference));
            let _ = result::destroy_matmul_pref(preference);
            chosen
        };
        fused.algorithm = chosen.map_err(failed)?.algo;
        Ok(fused)
    }

    /// Enqueues it.
    pub(super) fn run(&self, gpu: &Gpu, weight: Address, [x, activated, hidden]: [Address; 3]) -> Result<()> {
        self.set(sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &hidden)?;
        let (one, zero) = (1.0f32, 0.0f32);
        // SAFETY: arrays of these shapes, which live as long as the network; the factors are read before the call
        // returns.
        unsafe {
            result::matmul(
                self.handle,
                self.desc,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                weight.0 as *const c_void,
                self.weight,
                x.0 as *const c_void,
                self.x,
                activated.0 as *const c_void,
                self.out,
                activated.0 as *mut c_void,
                self.out,
                &raw const self.algorithm,
                self.workspace.place(0).0 as *mut c_void,
                WORKSPACE,
                gpu.stream.cu_stream().cast(),
            )
        }
        .map_err(failed)
    }

    fn set<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<()> {
        let at = std::ptr::from_ref(value).cast();
        // SAFETY: the description is alive; the library copies that many bytes of the value.
        unsafe { result::set_matmul_desc_attribute(self.desc, attribute, at, size_of::<T>()) }.map_err(failed)
    }
}

fn failed(error: CublasError) -> anyhow::Error {
    anyhow!("cuBLASLt cannot multiply with GELU: {:?}", error.0)
}

impl Drop for FusedGelu {
    fn drop(&mut self) {
        // SAFETY: made by `choose`, destroyed once; the network's owner waits for its streams before.
        unsafe {
            let _ = result::destroy_matmul_desc(self.desc);
            for layout in [self.weight, self.x, self.out] {
                let _ = result::destroy_matrix_layout(layout);
            }
            let _ = result::destroy_handle(self.handle);
        }
    }
}
