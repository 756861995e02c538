//! The kernels: their sources, and the functions compiled from them so far.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cudarc::driver::{CudaContext, CudaFunction, CudaModule, sys};

use super::compile::compile;
use super::driver::cuda;
use super::launch::THREADS;
use super::select::{Framing, Protocol};
use super::window::Layout;
use crate::dtype::{DType, ReduceOp};
use crate::error::Result;
use crate::wire::Collective;

const COMMON: &str = concat!(
    include_str!("kernels/types.cuh"),
    include_str!("kernels/memory.cuh"),
    include_str!("kernels/team.cuh"),
    include_str!("kernels/ll.cuh"),
    include_str!("kernels/ll128.cuh"),
    include_str!("kernels/fifo.cuh"),
    include_str!("kernels/direct.cuh"),
);
/// Compiled for each element type and operator that is used.
const REDUCING: &str = concat!(
    include_str!("kernels/reduce_slots.cuh"),
    include_str!("kernels/all_reduce_two_shot_ll.cu"),
    include_str!("kernels/all_reduce_two_shot.cu"),
    include_str!("kernels/reduce_scatter.cu"),
    include_str!("kernels/reduce.cu"),
    include_str!("kernels/phased.cu"),
);
/// The same for registered buffers.
const REDUCING_DIRECT: &str = concat!(
    include_str!("kernels/reduce_slots.cuh"),
    include_str!("kernels/reduce_buffers.cuh"),
    include_str!("kernels/reduce_scatter.cu"),
    include_str!("kernels/all_reduce_two_shot.cu"),
    include_str!("kernels/reduce.cu"),
);
/// Compiled once: they see bytes.
const MOVING: &str = concat!(
    include_str!("kernels/broadcast.cu"),
    include_str!("kernels/exchange.cu"),
    include_str!("kernels/send_recv.cu"),
    include_str!("kernels/phased.cu"),
);
const MOVING_DIRECT: &str = concat!(include_str!("kernels/broadcast.cu"), include_str!("kernels/exchange.cu"));

/// Schedules: compiled for each element type and operator, and once for those that see bytes.
const SCHEDULED: &str = concat!(include_str!("kernels/primitives.cuh"), include_str!("kernels/schedule.cu"));

/// One function of the sources.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Kernel {
    AllReduceOneShotLl,
    AllReduceOneShotLl128,
    AllReduceOneShot,
    AllReduceTwoShotLl,
    AllReduceTwoShotLl128,
    AllReduceTwoShot,
    AllReduceDirect,
    ReduceScatterLl,
    ReduceScatterLl128,
    ReduceScatterSimple,
    ReduceScatterDirect,
    ReduceLl,
    ReduceLl128,
    ReduceSimple,
    ReduceDirect,
    BroadcastLl,
    BroadcastLl128,
    BroadcastSimple,
    BroadcastDirect,
    ExchangeLl,
    ExchangeLl128,
    ExchangeSimple,
    ExchangeDirect,
    SendRecv,
    PhasedPush,
    PhasedSignal,
    PhasedCompare,
    PhasedTake,
    PhasedReduce,
    ScheduleSimple,
    ScheduleLl,
}

impl Kernel {
    #[cfg(test)]
    const ALL: [Kernel; 31] = [
        Kernel::AllReduceOneShotLl,
        Kernel::AllReduceOneShotLl128,
        Kernel::AllReduceOneShot,
        Kernel::AllReduceTwoShotLl,
        Kernel::AllReduceTwoShotLl128,
        Kernel::AllReduceTwoShot,
        Kernel::AllReduceDirect,
        Kernel::ReduceScatterLl,
        Kernel::ReduceScatterLl128,
        Kernel::ReduceScatterSimple,
        Kernel::ReduceScatterDirect,
        Kernel::ReduceLl,
        Kernel::ReduceLl128,
        Kernel::ReduceSimple,
        Kernel::ReduceDirect,
        Kernel::BroadcastLl,
        Kernel::BroadcastLl128,
        Kernel::BroadcastSimple,
        Kernel::BroadcastDirect,
        Kernel::ExchangeLl,
        Kernel::ExchangeLl128,
        Kernel::ExchangeSimple,
        Kernel::ExchangeDirect,
        Kernel::SendRecv,
        Kernel::PhasedPush,
        Kernel::PhasedSignal,
        Kernel::PhasedCompare,
        Kernel::PhasedTake,
        Kernel::PhasedReduce,
        Kernel::ScheduleSimple,
        Kernel::ScheduleLl,
    ];

    /// The kernel of a collective among so many ranks; `None` if there is none.
    pub(super) fn of(collective: Collective, protocol: Protocol, ranks: usize) -> Option<Kernel> {
        match protocol {
            Protocol::Schedule(_, Framing::Simple) => return Some(Kernel::ScheduleSimple),
            Protocol::Schedule(_, Framing::Ll) => return Some(Kernel::ScheduleLl),
            Protocol::Direct => return Self::direct(collective),
            Protocol::OneShot | Protocol::TwoShot => {
                return Self::in_lines(collective, protocol == Protocol::TwoShot).map(|[ll, _]| ll);
            }
            Protocol::OneShot128 | Protocol::TwoShot128 => {
                return Self::in_lines(collective, protocol == Protocol::TwoShot128).map(|[_, ll128]| ll128);
            }
            Protocol::Simple => {}
        }
        Some(match collective {
            // Between two ranks it sends as much, in one step.
            Collective::AllReduce if ranks == 2 => Kernel::AllReduceOneShot,
            Collective::AllReduce => Kernel::AllReduceTwoShot,
            Collective::ReduceScatter => Kernel::ReduceScatterSimple,
            Collective::Reduce => Kernel::ReduceSimple,
            Collective::Broadcast => Kernel::BroadcastSimple,
            Collective::AllGather | Collective::AllToAll => Kernel::ExchangeSimple,
            _ => return None,
        })
    }

    /// The kernel in lines of LL, and that in lines of LL128.
    fn in_lines(collective: Collective, two_steps: bool) -> Option<[Kernel; 2]> {
        Some(match collective {
            Collective::AllReduce if two_steps => [Kernel::AllReduceTwoShotLl, Kernel::AllReduceTwoShotLl128],
            Collective::AllReduce => [Kernel::AllReduceOneShotLl, Kernel::AllReduceOneShotLl128],
            Collective::ReduceScatter => [Kernel::ReduceScatterLl, Kernel::ReduceScatterLl128],
            Collective::Reduce => [Kernel::ReduceLl, Kernel::ReduceLl128],
            Collective::Broadcast => [Kernel::BroadcastLl, Kernel::BroadcastLl128],
            Collective::AllGather | Collective::AllToAll => [Kernel::ExchangeLl, Kernel::ExchangeLl128],
            _ => return None,
        })
    }

    fn name(self) -> &'static str {
        match self {
            Kernel::AllReduceOneShotLl => "all_reduce_one_shot_ll",
            Kernel::AllReduceOneShotLl128 => "all_reduce_one_shot_ll128",
            Kernel::AllReduceOneShot => "all_reduce_one_shot",
            Kernel::AllReduceTwoShotLl => "all_reduce_two_shot_ll",
            Kernel::AllReduceTwoShotLl128 => "all_reduce_two_shot_ll128",
            Kernel::AllReduceTwoShot => "all_reduce_two_shot",
            Kernel::AllReduceDirect => "all_reduce_direct",
            Kernel::ReduceScatterLl => "reduce_scatter_ll",
            Kernel::ReduceScatterLl128 => "reduce_scatter_ll128",
            Kernel::ReduceScatterSimple => "reduce_scatter_simple",
            Kernel::ReduceScatterDirect => "reduce_scatter_direct",
            Kernel::ReduceLl => "reduce_ll",
            Kernel::ReduceLl128 => "reduce_ll128",
            Kernel::ReduceSimple => "reduce_simple",
            Kernel::ReduceDirect => "reduce_direct",
            Kernel::BroadcastLl => "broadcast_ll",
            Kernel::BroadcastLl128 => "broadcast_ll128",
            Kernel::BroadcastSimple => "broadcast_simple",
            Kernel::BroadcastDirect => "broadcast_direct",
            Kernel::ExchangeLl => "exchange_ll",
            Kernel::ExchangeLl128 => "exchange_ll128",
            Kernel::ExchangeSimple => "exchange_simple",
            Kernel::ExchangeDirect => "exchange_direct",
            Kernel::SendRecv => "send_recv",
            Kernel::PhasedPush => "phased_push",
            Kernel::PhasedSignal => "phased_signal",
            Kernel::PhasedCompare => "phased_compare",
            Kernel::PhasedTake => "phased_take",
            Kernel::PhasedReduce => "phased_reduce",
            Kernel::ScheduleSimple => "schedule_simple",
            Kernel::ScheduleLl => "schedule_ll",
        }
    }

    fn direct(collective: Collective) -> Option<Kernel> {
        Some(match collective {
            Collective::AllReduce => Kernel::AllReduceDirect,
            Collective::ReduceScatter => Kernel::ReduceScatterDirect,
            Collective::Reduce => Kernel::ReduceDirect,
            Collective::Broadcast => Kernel::BroadcastDirect,
            Collective::AllGather | Collective::AllToAll => Kernel::ExchangeDirect,
            _ => return None,
        })
    }

    fn family(self) -> Family {
        match self {
            Kernel::ScheduleSimple | Kernel::ScheduleLl => Family::Scheduled,
            Kernel::AllReduceDirect
            | Kernel::ReduceScatterDirect
            | Kernel::ReduceDirect
            | Kernel::BroadcastDirect
            | Kernel::ExchangeDirect => Family::Direct,
            _ => Family::Plain,
        }
    }

    /// Whether it combines values whatever the collective, so that it is compiled for an element type and an operator.
    pub(super) fn reduces(self) -> bool {
        match self {
            Kernel::AllReduceOneShotLl
            | Kernel::AllReduceOneShotLl128
            | Kernel::AllReduceOneShot
            | Kernel::AllReduceTwoShotLl
            | Kernel::AllReduceTwoShotLl128
            | Kernel::AllReduceTwoShot
            | Kernel::AllReduceDirect
            | Kernel::ReduceScatterLl
            | Kernel::ReduceScatterLl128
            | Kernel::ReduceScatterSimple
            | Kernel::ReduceScatterDirect
            | Kernel::ReduceLl
            | Kernel::ReduceLl128
            | Kernel::ReduceSimple
            | Kernel::ReduceDirect
            | Kernel::PhasedReduce => true,
            Kernel::BroadcastLl
            | Kernel::BroadcastLl128
            | Kernel::BroadcastSimple
            | Kernel::BroadcastDirect
            | Kernel::ExchangeLl
            | Kernel::ExchangeLl128
            | Kernel::ExchangeSimple
            | Kernel::ExchangeDirect
            | Kernel::SendRecv
            | Kernel::PhasedPush
            | Kernel::PhasedSignal
            | Kernel::PhasedCompare
            | Kernel::PhasedTake
            | Kernel::ScheduleSimple
            | Kernel::ScheduleLl => false,
        }
    }
}

type Types = Option<(DType, ReduceOp)>;

/// Kernels that are compiled together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Family {
    Plain,
    /// For registered buffers: most communicators have none.
    Direct,
    Scheduled,
}

type Module = (Family, Types);

fn text(family: Family, reduces: bool) -> &'static str {
    match (family, reduces) {
        (Family::Plain, true) => REDUCING,
        (Family::Plain, false) => MOVING,
        (Family::Direct, true) => REDUCING_DIRECT,
        (Family::Direct, false) => MOVING_DIRECT,
        (Family::Scheduled, _) => SCHEDULED,
    }
}

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
    modules: HashMap<Module, Arc<CudaModule>>,
    functions: HashMap<(Kernel, Types), (sys::CUfunction, CudaFunction)>,
}

// SAFETY: a CUfunction is a handle that the driver lets any thread use; it lives as long as the CudaFunction beside it.
unsafe impl Send for Loaded {}

/// Those of this process, by context and layout. One set for all communicators of a device: loading code can make CUDA wait for
/// kernels that run, and a kernel that waits for a rank whose code is being loaded would wait for ever.
static SHARED: Mutex<Vec<Weak<Kernels>>> = Mutex::new(Vec::new());

impl Kernels {
    pub(super) fn shared(context: &Arc<CudaContext>, layout: Layout) -> Result<Arc<Kernels>> {
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        shared.retain(|one| one.strong_count() > 0);
        let same = |one: &Arc<Kernels>| one.context == *context && one.layout == layout;
        if let Some(kernels) = shared.iter().filter_map(Weak::upgrade).find(same) {
            return Ok(kernels);
        }
        let kernels = Arc::new(Kernels::new(context, layout)?);
        shared.push(Arc::downgrade(&kernels));
        Ok(kernels)
    }

    fn new(context: &Arc<CudaContext>, layout: Layout) -> Result<Kernels> {
        let capability = context
            .compute_capability()
            .map_err(|e| cuda("DeviceComm", "asking for the device's compute capability", e))?;
        Ok(Kernels { context: context.clone(), layout, capability, loaded: Mutex::default() })
    }

    /// The function of `kernel`, compiled if it is not there yet.
    pub(super) fn function(&self, kernel: Kernel, types: Types) -> Result<sys::CUfunction> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((function, _)) = loaded.functions.get(&(kernel, types)) {
            return Ok(*function);
        }
        let which = (kernel.family(), types);
        let module = match loaded.modules.get(&which) {
            Some(module) => module.clone(),
            None => {
                let (name, source, defines) = source(&self.layout, which);
                let ptx = compile(&name, &source, &defines, self.capability)?;
                let failed = |e| cuda("loading kernels", name.clone(), e);
                self.context.bind_to_thread().map_err(failed)?;
                let module = self.context.load_module(ptx).map_err(failed)?;
                loaded.modules.insert(which, module.clone());
                module
            }
        };
        let function = module.load_function(kernel.name()).map_err(|e| cuda("loading kernels", kernel.name(), e))?;
        let handle = function.cu_function();
        // The driver loads a function's code when it is first used; asking for an attribute is a use.
        let asked = function.get_attribute(sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS);
        let registers = asked.map_err(|e| cuda("loading kernels", kernel.name(), e))?;
        log::debug!("{}: {registers} registers", kernel.name());
        loaded.functions.insert((kernel, types), (handle, function));
        Ok(handle)
    }
}

/// Name, text and definitions of the source of a module.
fn source(layout: &Layout, (family, types): Module) -> (String, String, Vec<String>) {
    let mut defines = layout.defines();
    defines.push(format!("-DTHREADS={THREADS}"));
    if family == Family::Direct {
        defines.push("-DDIRECT".to_owned());
    }
    let kind = match family {
        Family::Plain => "",
        Family::Direct => "direct_",
        Family::Scheduled => "schedule_",
    };
    let text = [COMMON, text(family, types.is_some())].concat();
    match types {
        Some((dtype, op)) => {
            defines.push(format!("-DDTYPE={}", dtype as u8));
            defines.push(format!("-DOP={}", op as u8));
            (format!("{kind}reducing_{dtype}_{op}.cu"), text, defines)
        }
        None => (format!("{kind}moving.cu"), text, defines),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_is_in_its_source_once() {
        for kernel in Kernel::ALL {
            let source = text(kernel.family(), kernel.reduces());
            // In a line of its own or behind its type: all_reduce_direct is another than reduce_direct.
            let begins = ["\n", "void "].map(|before| {
                source.matches(&format!("{before}{}(const __grid_constant__ Team team", kernel.name())).count()
            });
            assert_eq!(begins.iter().sum::<usize>(), 1, "{kernel:?}");
        }
    }

    /// Compiles for Hopper: each element type, each operator. NVRTC needs no GPU.
    #[test]
    fn every_source_compiles() {
        let all = DType::ALL.into_iter().zip(ReduceOp::ALL.into_iter().cycle()).map(Some);
        let families = |types| [Family::Plain, Family::Direct, Family::Scheduled].map(|family| (family, types));
        for module in [None].into_iter().chain(all).flat_map(families) {
            let (name, source, defines) = source(&Layout::new(4, 1, &crate::Config::default()), module);
            match compile(&name, &source, &defines, (9, 0)) {
                Ok(_) => {}
                Err(error @ crate::Error::Unsupported { .. }) => {
                    return eprintln!("SKIPPED every_source_compiles: {error}");
                }
                Err(error) => panic!("{name}: {error}"),
            }
        }
    }
}
