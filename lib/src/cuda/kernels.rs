//! The kernels: their sources, and the functions compiled from them so far.

use std::collections::HashMap;
use std::hash::Hash;
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
    ReduceTwoShotLl,
    ReduceTwoShotLl128,
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
    const ALL: [Kernel; 33] = [
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
        Kernel::ReduceTwoShotLl,
        Kernel::ReduceTwoShotLl128,
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
            Collective::Reduce if two_steps => [Kernel::ReduceTwoShotLl, Kernel::ReduceTwoShotLl128],
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
            Kernel::ReduceTwoShotLl => "reduce_two_shot_ll",
            Kernel::ReduceTwoShotLl128 => "reduce_two_shot_ll128",
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

    fn unit(self) -> Unit {
        match self {
            Kernel::AllReduceOneShotLl
            | Kernel::AllReduceOneShotLl128
            | Kernel::ReduceScatterLl
            | Kernel::ReduceScatterLl128
            | Kernel::AllReduceOneShot
            | Kernel::ReduceScatterSimple => Unit::ReduceScatter,
            Kernel::ReduceScatterDirect => Unit::ReduceScatterDirect,
            Kernel::AllReduceTwoShotLl | Kernel::AllReduceTwoShotLl128 => Unit::TwoShotLines,
            Kernel::AllReduceTwoShot => Unit::TwoShot,
            Kernel::AllReduceDirect => Unit::AllReduceDirect,
            Kernel::ReduceLl | Kernel::ReduceLl128 | Kernel::ReduceSimple => Unit::Reduce,
            Kernel::ReduceTwoShotLl | Kernel::ReduceTwoShotLl128 => Unit::ReduceTwoShotLines,
            Kernel::ReduceDirect => Unit::ReduceDirect,
            Kernel::BroadcastLl | Kernel::BroadcastLl128 | Kernel::BroadcastSimple => Unit::Broadcast,
            Kernel::BroadcastDirect => Unit::BroadcastDirect,
            Kernel::ExchangeLl | Kernel::ExchangeLl128 | Kernel::ExchangeSimple => Unit::Exchange,
            Kernel::ExchangeDirect => Unit::ExchangeDirect,
            Kernel::SendRecv => Unit::SendRecv,
            Kernel::PhasedPush | Kernel::PhasedSignal | Kernel::PhasedCompare | Kernel::PhasedTake => Unit::Phased,
            Kernel::PhasedReduce => Unit::PhasedReduce,
            Kernel::ScheduleSimple | Kernel::ScheduleLl => Unit::Schedule,
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
            | Kernel::ReduceTwoShotLl
            | Kernel::ReduceTwoShotLl128
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

/// Kernels that are compiled together. Few: who calls one collective of one type should not wait for the compiler of all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Unit {
    ReduceScatter,
    TwoShotLines,
    TwoShot,
    Reduce,
    ReduceTwoShotLines,
    Broadcast,
    Exchange,
    SendRecv,
    Phased,
    PhasedReduce,
    Schedule,
    // For registered buffers.
    ReduceScatterDirect,
    AllReduceDirect,
    ReduceDirect,
    BroadcastDirect,
    ExchangeDirect,
}

/// `concat!` of files in `kernels`.
macro_rules! files {
    ($($file:literal)+) => { concat!($(include_str!(concat!("kernels/", $file))),+) };
}

const COMMON: &str =
    files!("types.cuh" "memory.cuh" "lanes.cuh" "team.cuh" "ll.cuh" "ll128.cuh" "fifo.cuh" "pieces.cuh" "direct.cuh");

impl Unit {
    /// What comes behind [`COMMON`].
    fn text(self) -> &'static str {
        match self {
            Unit::ReduceScatter => files!("reduce_slots.cuh" "reduce_scatter.cu"),
            Unit::TwoShotLines => files!("reduce_slots.cuh" "all_reduce_two_shot_ll.cu"),
            Unit::TwoShot => files!("reduce_slots.cuh" "all_reduce_two_shot.cu"),
            Unit::ReduceTwoShotLines => files!("reduce_slots.cuh" "reduce_two_shot_ll.cu"),
            Unit::Reduce => files!("reduce_slots.cuh" "reduce.cu"),
            Unit::Broadcast | Unit::BroadcastDirect => files!("broadcast.cu"),
            Unit::Exchange | Unit::ExchangeDirect => files!("exchange.cu"),
            Unit::SendRecv => files!("send_recv.cu"),
            Unit::Phased => files!("phased.cu"),
            Unit::PhasedReduce => files!("reduce_slots.cuh" "phased.cu"),
            Unit::Schedule => files!("primitives.cuh" "schedule.cu"),
            Unit::ReduceScatterDirect => files!("reduce_slots.cuh" "reduce_buffers.cuh" "reduce_scatter.cu"),
            // Where a buffer is not registered it takes the slots; between two ranks those of reduce_scatter.
            Unit::AllReduceDirect => {
                files!("reduce_slots.cuh" "reduce_buffers.cuh" "reduce_scatter.cu" "all_reduce_two_shot.cu")
            }
            Unit::ReduceDirect => files!("reduce_slots.cuh" "reduce_buffers.cuh" "reduce.cu"),
        }
    }

    fn is_direct(self) -> bool {
        matches!(
            self,
            Unit::ReduceScatterDirect
                | Unit::AllReduceDirect
                | Unit::ReduceDirect
                | Unit::BroadcastDirect
                | Unit::ExchangeDirect
        )
    }
}

type Module = (Unit, Types);

/// Things that are made once each. Who makes one holds up those that want the same, and nobody else: loading code can make CUDA wait
/// for kernels that run, and these may wait for a rank of this process that still has to find its kernel here.
#[derive(Debug)]
struct Shelf<K, V>(Mutex<HashMap<K, Arc<Mutex<Option<V>>>>>);

impl<K: Eq + Hash, V: Clone> Shelf<K, V> {
    fn new() -> Shelf<K, V> {
        Shelf(Mutex::new(HashMap::new()))
    }

    fn get(&self, key: K, make: impl FnOnce() -> Result<V>) -> Result<V> {
        let place = self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(key).or_default().clone();
        let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(value) = place.as_ref() {
            return Ok(value.clone());
        }
        Ok(place.insert(make()?).clone())
    }
}

/// What has been compiled and loaded for one device.
#[derive(Debug)]
pub(super) struct Kernels {
    context: Arc<CudaContext>,
    layout: Layout,
    capability: (i32, i32),
    modules: Shelf<Module, Arc<CudaModule>>,
    functions: Shelf<(Kernel, Types), Function>,
}

/// A handle, and what keeps it.
#[derive(Debug, Clone)]
struct Function {
    handle: sys::CUfunction,
    _loaded: CudaFunction,
}

// SAFETY: a CUfunction is a handle that the driver lets any thread use; it lives as long as the CudaFunction beside it.
unsafe impl Send for Function {}

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
        Ok(Kernels { context: context.clone(), layout, capability, modules: Shelf::new(), functions: Shelf::new() })
    }

    /// The function of `kernel`, compiled if it is not there yet.
    pub(super) fn function(&self, kernel: Kernel, types: Types) -> Result<sys::CUfunction> {
        self.functions.get((kernel, types), || self.load(kernel, types)).map(|function| function.handle)
    }

    fn load(&self, kernel: Kernel, types: Types) -> Result<Function> {
        let which = (kernel.unit(), types);
        let module = self.modules.get(which, || {
            let (name, source, defines) = source(&self.layout, which);
            let ptx = compile(&name, &source, &defines, self.capability)?;
            let failed = |e| cuda("loading kernels", name.clone(), e);
            self.context.bind_to_thread().map_err(failed)?;
            self.context.load_module(ptx).map_err(failed)
        })?;
        let function = module.load_function(kernel.name()).map_err(|e| cuda("loading kernels", kernel.name(), e))?;
        let handle = function.cu_function();
        // The driver loads a function's code when it is first used; asking for an attribute is a use.
        let asked = function.get_attribute(sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS);
        let registers = asked.map_err(|e| cuda("loading kernels", kernel.name(), e))?;
        log::debug!("{}: {registers} registers", kernel.name());
        Ok(Function { handle, _loaded: function })
    }
}

/// Name, text and definitions of the source of a module.
fn source(layout: &Layout, (unit, types): Module) -> (String, String, Vec<String>) {
    let mut defines = layout.defines();
    defines.push(format!("-DTHREADS={THREADS}"));
    if unit.is_direct() {
        defines.push("-DDIRECT".to_owned());
    }
    let text = [COMMON, unit.text()].concat();
    match types {
        Some((dtype, op)) => {
            defines.push(format!("-DDTYPE={}", dtype as u8));
            defines.push(format!("-DOP={}", op as u8));
            (format!("{unit:?} of {dtype}, {op}"), text, defines)
        }
        None => (format!("{unit:?}"), text, defines),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_kernel_is_in_its_source_once() {
        for kernel in Kernel::ALL {
            let source = kernel.unit().text();
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
        let some = |(i, dtype): (usize, DType)| {
            let ops: Vec<ReduceOp> = ReduceOp::ALL.into_iter().filter(|op| op.applies_to(dtype)).collect();
            Some((dtype, ops[i % ops.len()]))
        };
        let all = || DType::ALL.into_iter().enumerate().map(some);
        let units: HashSet<(Unit, bool)> = Kernel::ALL.iter().map(|kernel| (kernel.unit(), kernel.reduces())).collect();
        let types = |(unit, reduces)| {
            // A schedule is compiled for both.
            let some: Vec<Types> = if reduces || unit == Unit::Schedule { all().collect() } else { Vec::new() };
            let none = (!reduces).then_some(None);
            none.into_iter().chain(some).map(move |types| (unit, types))
        };
        for module in units.into_iter().flat_map(types) {
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
