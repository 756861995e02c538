//! The kernels: their sources, and the functions compiled from them so far.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, CudaFunction, CudaModule, sys};

use super::call::THREADS;
use super::compile::compile;
use super::driver::cuda;
use super::select::Protocol;
use super::window::Layout;
use crate::dtype::{DType, ReduceOp};
use crate::error::Result;
use crate::wire::Collective;

const COMMON: &str = concat!(
    include_str!("kernels/types.cuh"),
    include_str!("kernels/memory.cuh"),
    include_str!("kernels/team.cuh"),
    include_str!("kernels/ll.cuh"),
    include_str!("kernels/fifo.cuh"),
);
/// Compiled for each element type and operator that is used.
const REDUCING: &str = concat!(
    include_str!("kernels/all_reduce_one_shot.cu"),
    include_str!("kernels/all_reduce_two_shot_ll.cu"),
    include_str!("kernels/all_reduce_two_shot.cu"),
    include_str!("kernels/reduce_scatter.cu"),
    include_str!("kernels/reduce.cu"),
);
/// Compiled once: they see bytes.
const MOVING: &str = concat!(
    include_str!("kernels/broadcast.cu"),
    include_str!("kernels/exchange.cu"),
    include_str!("kernels/send_recv.cu"),
);

/// One function of the sources.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Kernel {
    AllReduceOneShot,
    AllReduceTwoShotLl,
    AllReduceTwoShot,
    ReduceScatterLl,
    ReduceScatterSimple,
    ReduceLl,
    ReduceSimple,
    BroadcastLl,
    BroadcastSimple,
    ExchangeLl,
    ExchangeSimple,
    SendRecv,
}

impl Kernel {
    #[cfg(test)]
    const ALL: [Kernel; 12] = [
        Kernel::AllReduceOneShot,
        Kernel::AllReduceTwoShotLl,
        Kernel::AllReduceTwoShot,
        Kernel::ReduceScatterLl,
        Kernel::ReduceScatterSimple,
        Kernel::ReduceLl,
        Kernel::ReduceSimple,
        Kernel::BroadcastLl,
        Kernel::BroadcastSimple,
        Kernel::ExchangeLl,
        Kernel::ExchangeSimple,
        Kernel::SendRecv,
    ];

    /// The kernel of a collective; `None` if there is none.
    pub(super) fn of(collective: Collective, protocol: Protocol) -> Option<Kernel> {
        let ll = protocol != Protocol::Simple;
        Some(match collective {
            Collective::AllReduce => match protocol {
                Protocol::OneShot => Kernel::AllReduceOneShot,
                Protocol::TwoShot => Kernel::AllReduceTwoShotLl,
                Protocol::Simple => Kernel::AllReduceTwoShot,
            },
            Collective::ReduceScatter if ll => Kernel::ReduceScatterLl,
            Collective::ReduceScatter => Kernel::ReduceScatterSimple,
            Collective::Reduce if ll => Kernel::ReduceLl,
            Collective::Reduce => Kernel::ReduceSimple,
            Collective::Broadcast if ll => Kernel::BroadcastLl,
            Collective::Broadcast => Kernel::BroadcastSimple,
            Collective::AllGather | Collective::AllToAll if ll => Kernel::ExchangeLl,
            Collective::AllGather | Collective::AllToAll => Kernel::ExchangeSimple,
            _ => return None,
        })
    }

    fn name(self) -> &'static str {
        match self {
            Kernel::AllReduceOneShot => "all_reduce_one_shot",
            Kernel::AllReduceTwoShotLl => "all_reduce_two_shot_ll",
            Kernel::AllReduceTwoShot => "all_reduce_two_shot",
            Kernel::ReduceScatterLl => "reduce_scatter_ll",
            Kernel::ReduceScatterSimple => "reduce_scatter_simple",
            Kernel::ReduceLl => "reduce_ll",
            Kernel::ReduceSimple => "reduce_simple",
            Kernel::BroadcastLl => "broadcast_ll",
            Kernel::BroadcastSimple => "broadcast_simple",
            Kernel::ExchangeLl => "exchange_ll",
            Kernel::ExchangeSimple => "exchange_simple",
            Kernel::SendRecv => "send_recv",
        }
    }

    /// Whether it combines values, so that it is compiled for an element type and an operator.
    pub(super) fn reduces(self) -> bool {
        use Kernel::{BroadcastLl, BroadcastSimple, ExchangeLl, ExchangeSimple, SendRecv};
        !matches!(self, BroadcastLl | BroadcastSimple | ExchangeLl | ExchangeSimple | SendRecv)
    }
}

type Types = Option<(DType, ReduceOp)>;

/// What has been compiled and loaded for one device.
#[derive(Debug)]
pub(super) struct Kernels {
    context: Arc<CudaContext>,
    layout: Layout,
    capability: (i32, i32),
    loaded: Mutex<Loaded>,
}

#[derive(Debug, Default)]
struct Loaded {
    modules: HashMap<Types, Arc<CudaModule>>,
    functions: HashMap<(Kernel, Types), (sys::CUfunction, CudaFunction)>,
}

// SAFETY: a CUfunction is a handle that the driver lets any thread use; it lives as long as the CudaFunction beside it.
unsafe impl Send for Loaded {}

impl Kernels {
    pub(super) fn new(context: &Arc<CudaContext>, layout: Layout) -> Result<Kernels> {
        let capability =
            context.compute_capability().map_err(|e| cuda("DeviceComm", "asking for the device's compute capability", e))?;
        Ok(Kernels { context: context.clone(), layout, capability, loaded: Mutex::default() })
    }

    /// The function of `kernel`, compiled if it is not there yet.
    pub(super) fn function(&self, kernel: Kernel, types: Types) -> Result<sys::CUfunction> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((function, _)) = loaded.functions.get(&(kernel, types)) {
            return Ok(*function);
        }
        let module = match loaded.modules.get(&types) {
            Some(module) => module.clone(),
            None => {
                let (name, source, defines) = source(&self.layout, types);
                let ptx = compile(&name, &source, &defines, self.capability)?;
                let failed = |e| cuda("loading kernels", name.clone(), e);
                self.context.bind_to_thread().map_err(failed)?;
                let module = self.context.load_module(ptx).map_err(failed)?;
                loaded.modules.insert(types, module.clone());
                module
            }
        };
        let function = module.load_function(kernel.name()).map_err(|e| cuda("loading kernels", kernel.name(), e))?;
        let handle = function.cu_function();
        loaded.functions.insert((kernel, types), (handle, function));
        Ok(handle)
    }
}

/// Name, text and definitions of the source of a module.
fn source(layout: &Layout, types: Types) -> (String, String, Vec<String>) {
    let mut defines = layout.defines();
    defines.push(format!("-DTHREADS={THREADS}"));
    match types {
        Some((dtype, op)) => {
            defines.push(format!("-DDTYPE={}", dtype as u8));
            defines.push(format!("-DOP={}", op as u8));
            (format!("reducing_{dtype}_{op}.cu"), [COMMON, REDUCING].concat(), defines)
        }
        None => ("moving.cu".to_owned(), [COMMON, MOVING].concat(), defines),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_is_in_its_source_once() {
        for kernel in Kernel::ALL {
            let source = if kernel.reduces() { REDUCING } else { MOVING };
            assert_eq!(source.matches(&format!("\n{}(", kernel.name())).count(), 1, "{kernel:?}");
        }
        assert_eq!(REDUCING.matches("__global__").count() + MOVING.matches("__global__").count(), Kernel::ALL.len());
    }

    /// Compiles every module for Hopper; NVRTC needs no GPU.
    #[test]
    fn every_source_compiles() {
        let all = DType::ALL.into_iter().flat_map(|d| ReduceOp::ALL.map(|op| Some((d, op))));
        for types in [None].into_iter().chain(all) {
            let (name, source, defines) = source(&Layout::new(4), types);
            match compile(&name, &source, &defines, (9, 0)) {
                Ok(_) => {}
                Err(error @ crate::Error::Unsupported { .. }) => return eprintln!("SKIPPED every_source_compiles: {error}"),
                Err(error) => panic!("{name}: {error}"),
            }
        }
    }
}
