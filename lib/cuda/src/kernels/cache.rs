//! Kernels compiled and loaded so far.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cudarc::driver::{CudaContext, CudaFunction, sys};

use super::{Kernel, Types, unit};
use crate::driver::compile::compile;
use crate::driver::{Uncaptured, cuda, version};
use crate::window::Layout;
use tinynccl_plan::error::{Error, Result};

/// Values that are made once each. A thread that makes one blocks only threads that need the same one. Loading code can
/// make CUDA wait for running kernels, and these may wait for a rank of this process that still has to find its kernel
/// here.
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

/// GPUs and drivers on which a kernel may begin early, also in a captured graph.
const EARLY_CAPABILITY: (i32, i32) = (9, 0);
const EARLY_DRIVER: i32 = 12_030;

/// Kernels that have been compiled and loaded for one device.
#[derive(Debug)]
pub(crate) struct Kernels {
    context: Arc<CudaContext>,
    layout: Layout,
    capability: (i32, i32),
    begins_early: bool,
    functions: Shelf<(Kernel, Types), Loaded>,
}

/// A kernel as it is launched, as long as its [`Kernels`] live.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Function {
    pub(super) handle: sys::CUfunction,
    /// It may begin while the kernel before in its stream ends, and waits for that itself (`team.cuh`).
    pub(super) begins_early: bool,
}

impl Function {
    /// Function of a kernel that does not wait itself for the kernel before it.
    pub(crate) fn late(handle: sys::CUfunction) -> Function {
        Function { handle, begins_early: false }
    }
}

/// A function, and its owner.
#[derive(Debug, Clone)]
struct Loaded {
    function: Function,
    _owner: CudaFunction,
}

// SAFETY: a CUfunction is a handle that the driver lets any thread use; it lives as long as the CudaFunction beside it.
unsafe impl Send for Loaded {}

/// Kernels of this process, by context and layout. One set for all communicators of a device: loading code can make
/// CUDA wait for kernels that run, and a kernel that waits for a rank whose code is being loaded would wait forever.
static SHARED: Mutex<Vec<Weak<Kernels>>> = Mutex::new(Vec::new());

impl Kernels {
    pub(crate) fn shared(context: &Arc<CudaContext>, layout: Layout) -> Result<Arc<Kernels>> {
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
            .map_err(|e| cuda("DeviceComm", "querying the device's compute capability", e))?;
        let driver = version().map_err(|e| cuda("DeviceComm", "querying the driver's version", e))?;
        let begins_early = capability >= EARLY_CAPABILITY && driver >= EARLY_DRIVER;
        Ok(Kernels { context: context.clone(), layout, capability, begins_early, functions: Shelf::new() })
    }

    /// The function of `kernel`, compiled if it is missing.
    pub(crate) fn function(&self, kernel: Kernel, types: Types) -> Result<Function> {
        let load = || {
            // Loading code may wait for the device.
            let _uncaptured = Uncaptured::begin();
            self.load(kernel, types)
        };
        self.functions.get((kernel, types), load).map(|loaded| loaded.function)
    }

    fn load(&self, kernel: Kernel, types: Types) -> Result<Loaded> {
        let missing = || Error::invalid("loading kernels", format!("there is no kernel {}", kernel.name()));
        let (of, text, defines) = unit(&self.layout, kernel, types).ok_or_else(missing)?;
        let ptx = compile(&of, &text, &defines, self.capability)?;
        let failed = |e| cuda("loading kernels", of.as_str(), e);
        self.context.bind_to_thread().map_err(failed)?;
        let module = self.context.load_module(ptx).map_err(failed)?;
        let name = kernel.name();
        let function = module.load_function(&name).map_err(failed)?;
        let handle = function.cu_function();
        // The driver loads a function's code when it is first used; asking for an attribute is a use.
        let asked = function.get_attribute(sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS);
        let registers = asked.map_err(failed)?;
        log::debug!("{name}: {registers} registers");
        Ok(Loaded { function: Function { handle, begins_early: self.begins_early }, _owner: function })
    }
}
