//! The kernels: their sources, compiled for one model's shape, and launched with their arguments checked.

use std::collections::HashMap;

use anyhow::{Context, Result, bail, ensure};
use cudarc::driver::{CudaFunction, CudaStream, sys};
use cudarc::nvrtc::Ptx;
use tinynccl::cuda;

use super::Precision;
use super::device::{Address, Array, Gpu, failed};
use crate::config::ModelConfig;

const COMMON: &str = concat!(
    include_str!("kernels/common.cuh"),
    include_str!("kernels/random.cuh"),
    include_str!("kernels/step.cu"),
    include_str!("kernels/layernorm.cu"),
    include_str!("kernels/gelu.cu"),
    include_str!("kernels/loss.cu"),
    include_str!("kernels/adamw.cu"),
);
const UNFUSED: &str = include_str!("kernels/softmax.cu");
const FUSED: &str = concat!(
    include_str!("kernels/mma.cuh"),
    include_str!("kernels/attention_forward.cu"),
    include_str!("kernels/attention_backward.cu"),
);
/// Shared memory that a block may have on all GPUs with bfloat16 tensor cores (compute capability 8.6 has the least).
const SHARED_BYTES: usize = 99 << 10;

/// Model, precision and variant of attention that the kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    /// The model's.
    pub model: ModelConfig,
    /// Type of the activations.
    pub precision: Precision,
    /// Attention in one kernel; else products with a softmax between.
    pub fused: bool,
}

impl Shape {
    /// Fails for shapes that no kernel is for.
    pub fn new(model: ModelConfig, precision: Precision) -> Result<Shape> {
        let (c, width) = (model.channels, model.head_dim());
        ensure!(
            c.is_multiple_of(8) && width.is_multiple_of(8) && c <= 1024,
            "--device cuda: {c} channels in heads of {width}: both must be multiples of 8, and channels at most 1024"
        );
        let shape = Shape { model, precision, fused: false };
        let fused = precision == Precision::Bf16
            && matches!(width, 16 | 32 | 64)
            && model.context.is_multiple_of(32)
            && shape.attention_bytes() <= SHARED_BYTES;
        Ok(Shape { fused, ..shape })
    }

    /// Distance of two rows of logits: whole groups of 8, so that every row is aligned.
    pub fn vocab_stride(&self) -> usize {
        self.model.vocab.next_multiple_of(8)
    }

    /// Columns of logits that products compute. Tensor cores want multiples of 8, so the first positions serve as
    /// embeddings of characters that do not exist: they lie behind those that do, nothing reads their logits, whose
    /// gradients are zero.
    pub fn vocab_columns(&self) -> usize {
        let stride = self.vocab_stride();
        if stride - self.model.vocab <= self.model.context { stride } else { self.model.vocab }
    }

    /// Shared memory of a block of the fused attention: two padded tiles, and two values per row.
    pub fn attention_bytes(&self) -> usize {
        let ModelConfig { context, .. } = self.model;
        2 * context * (self.model.head_dim() + 8) * 2 + 2 * context * 4
    }

    fn source(&self) -> String {
        format!("{COMMON}{}", if self.fused { FUSED } else { UNFUSED })
    }

    fn defines(&self) -> Vec<String> {
        let m = &self.model;
        [
            ("ACT_BF16", usize::from(self.precision == Precision::Bf16)),
            ("CHANNELS", m.channels),
            ("CONTEXT", m.context),
            ("HEADS", m.heads),
            ("HEAD_DIM", m.head_dim()),
            ("VOCAB", m.vocab),
            ("VOCAB_STRIDE", self.vocab_stride()),
        ]
        .iter()
        .map(|(name, value)| format!("-D{name}={value}"))
        .collect()
    }
}

/// Compiles the kernels of a shape to PTX.
pub fn compile(shape: &Shape, capability: (i32, i32)) -> Result<Ptx> {
    let (major, minor) = capability;
    if shape.precision == Precision::Bf16 && major < 8 {
        bail!("--precision bf16 needs compute capability 8.0, this GPU has {major}.{minor}: take --precision f32");
    }
    Ok(cuda::compile("gpt.cu", &shape.source(), &shape.defines(), capability)?)
}

/// As `struct Mask` of `kernels/random.cuh`.
#[derive(Debug, Clone, Copy)]
pub struct Mask {
    /// One key per sample.
    pub keys: Address,
    /// 0: nothing is dropped.
    pub threshold: u32,
    /// 1 / (1 - p).
    pub scale: f32,
}

/// An argument of a kernel: its type, as the sources name it, and its bytes.
#[derive(Debug, Clone, Copy)]
pub struct Arg {
    kind: &'static str,
    bytes: [u64; 2],
}

/// Types that convert to a kernel's argument: `kind: type => bytes`. The first bytes of a word are its lowest.
macro_rules! arguments {
    ($($kind:literal: $type:ty => |$value:ident| $bytes:expr),* $(,)?) => {
        const KINDS: &[&str] = &[$($kind),*];
        $(impl From<$type> for Arg {
            fn from($value: $type) -> Arg {
                Arg { kind: $kind, bytes: $bytes }
            }
        })*
    };
}
arguments! {
    "*": Address => |address| [address.0, 0],
    "u32": u32 => |value| [value.into(), 0],
    "u64": u64 => |value| [value, 0],
    "float": f32 => |value| [value.to_bits().into(), 0],
    "Mask": Mask => |mask| [mask.keys.0, u64::from(mask.scale.to_bits()) << 32 | u64::from(mask.threshold)],
}

impl<T> From<&Array<T>> for Arg {
    fn from(array: &Array<T>) -> Arg {
        Address::from(array).into()
    }
}

/// The arguments of a launch: arrays, addresses, numbers, masks.
macro_rules! args {
    ($($argument:expr),* $(,)?) => {
        &[$($crate::gpu::kernels::Arg::from($argument)),*]
    };
}
pub(super) use args;

/// Names and types of the parameters of all kernels of a source.
fn signatures(source: &str) -> Result<Vec<(String, Vec<&'static str>)>> {
    let kernel = |text: &str| {
        let head = &text[..text.find(") {")?];
        let (before, parameters) = head.rsplit_once('(')?;
        let name = before.rsplit(|c: char| !c.is_alphanumeric() && c != '_').next()?;
        let known = |parameter: &str| {
            let word = parameter.trim().trim_start_matches("const ").split(' ').next()?;
            let word = if parameter.contains('*') { "*" } else { word };
            KINDS.iter().copied().find(|known| *known == word)
        };
        Some((name.to_owned(), parameters.split(',').map(known).collect::<Option<Vec<_>>>()?))
    };
    source
        .split("__global__")
        .skip(1)
        .map(|text| kernel(text).context("a kernel's parameters are not understood"))
        .collect()
}

/// Dimensions of a launch: blocks, threads of each, and the shared memory of each in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Grid {
    /// Blocks.
    pub blocks: (u32, u32),
    /// Threads of a block.
    pub threads: (u32, u32),
    /// Shared memory of a block.
    pub shared: u32,
}

impl Grid {
    /// One thread.
    pub const ONE: Grid = Grid { blocks: (1, 1), threads: (1, 1), shared: 0 };

    /// Blocks of 256 threads.
    pub fn blocks(n: usize) -> Grid {
        Grid { blocks: (n as u32, 1), threads: (256, 1), shared: 0 }
    }

    /// A thread of a block of 256 for each of `n`.
    pub fn each(n: usize) -> Grid {
        Self::blocks(n.div_ceil(256))
    }

    /// A warp of a block of 8 for each of `n` rows.
    pub fn rows(n: usize) -> Grid {
        Self::blocks(n.div_ceil(8))
    }
}

/// Compiled kernels.
pub struct Kernels {
    functions: HashMap<String, (CudaFunction, Vec<&'static str>)>,
}

impl Kernels {
    /// Compiles and loads the kernels of a shape.
    pub fn new(gpu: &Gpu, shape: &Shape) -> Result<Kernels> {
        let ptx = compile(shape, gpu.capability)?;
        let module = gpu.context.load_module(ptx).map_err(failed("cannot load the kernels"))?;
        let mut functions = HashMap::new();
        for (name, types) in signatures(&shape.source())? {
            let function = module.load_function(&name).map_err(failed(format!("cannot find {name}")))?;
            if name.starts_with("attention_") {
                let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                let bytes = shape.attention_bytes();
                let doing = format!("{name} cannot have {bytes} bytes of shared memory");
                function.set_attribute(most, bytes as i32).map_err(failed(doing))?;
            }
            functions.insert(name, (function, types));
        }
        Ok(Kernels { functions })
    }

    /// Enqueues a kernel. Types of arguments are checked here; that addresses are of arrays long enough, and still
    /// there when it runs, is on the caller, who owns all of them for the whole training.
    pub fn launch(&self, stream: &CudaStream, name: &str, grid: Grid, arguments: &[Arg]) -> Result<()> {
        let (function, types) = self.functions.get(name).with_context(|| format!("no kernel {name}"))?;
        let given: Vec<_> = arguments.iter().map(|argument| argument.kind).collect();
        ensure!(given == *types, "{name} takes {types:?}, was given {given:?}");
        let mut arguments = arguments.to_vec();
        let mut pointers: Vec<_> = arguments.iter_mut().map(|argument| (&raw mut argument.bytes).cast()).collect();
        let (blocks, threads) = ((grid.blocks.0, grid.blocks.1, 1), (grid.threads.0, grid.threads.1, 1));
        // SAFETY: number and types of the arguments are the kernel's; see above for what they point to.
        unsafe {
            cudarc::driver::result::launch_kernel(
                function.cu_function(),
                blocks,
                threads,
                grid.shared,
                stream.cu_stream(),
                &mut pointers,
            )
        }
        .map_err(failed(format!("cannot launch {name}")))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::config::Preset;

    fn shapes() -> Vec<Shape> {
        let mut list = Vec::new();
        for preset in [Preset::Tiny, Preset::Small, Preset::Full] {
            for precision in [Precision::F32, Precision::Tf32, Precision::Bf16] {
                list.push(Shape::new(preset.model(65), precision).unwrap());
            }
        }
        list
    }

    #[test]
    fn which_shapes_have_fused_attention() {
        let fused: Vec<bool> = shapes().iter().map(|s| s.fused).collect();
        assert_eq!(fused, [false, false, false, false, false, true, false, false, true]);
        let odd = ModelConfig { heads: 2, channels: 20, ..Preset::Tiny.model(9) };
        assert!(Shape::new(odd, Precision::F32).unwrap_err().to_string().contains("multiples of 8"));
    }

    #[test]
    fn every_kernels_parameters_are_understood() {
        for shape in shapes() {
            let source = shape.source();
            let list = signatures(&source).unwrap();
            assert_eq!(list.len(), source.matches("extern \"C\" __global__").count());
            let find = |name: &str| list.iter().find(|(n, _)| n == name).map(|(_, types)| types.clone());
            assert_eq!(find("mean_loss"), Some(vec!["*", "*", "*", "u32"]));
            assert_eq!(find("square_sum"), Some(vec!["*", "*", "u64"]));
            if shape.fused {
                assert_eq!(find("attention_forward"), Some(vec!["*", "*", "*", "Mask", "float"]));
            } else {
                assert_eq!(find("causal_softmax"), Some(vec!["*", "*", "*", "Mask", "u32"]));
            }
        }
    }

    /// NVRTC needs no GPU.
    #[test]
    fn every_shape_compiles() {
        // SAFETY: only tries to load the library.
        if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: compiling ddp-gpt's kernels: there is no NVRTC (libnvrtc.so) here"
            );
            return;
        }
        for shape in shapes() {
            for capability in [(8, 0), (9, 0)] {
                let ptx = compile(&shape, capability).unwrap().to_src();
                for (name, _) in signatures(&shape.source()).unwrap() {
                    assert!(ptx.contains(&format!(".entry {name}(")), "{name} {shape:?}");
                }
            }
        }
    }

    #[test]
    fn bf16_needs_its_tensor_cores() {
        let e = compile(&Shape::new(Preset::Small.model(65), Precision::Bf16).unwrap(), (7, 5)).unwrap_err();
        assert!(e.to_string().contains("--precision f32"), "{e}");
    }
}
