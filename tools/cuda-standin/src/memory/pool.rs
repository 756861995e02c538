//! Pools of device memory. They keep nothing: memory that is freed is gone.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::{
    CUdevice, CUmemAccess_flags, CUmemAccessDesc, CUmemLocation, CUmemLocationType, CUmemPool_attribute,
    CUmemPoolProps, CUmemoryPool, CUresult,
};

use super::{Kind, allocations};
use crate::calls::{Answer, ensure, lock, put};
use crate::device::device;
use crate::handles::{self, Table};

pub(crate) static POOLS: Table<Pool> = Table::new();

/// A pool.
pub(crate) struct Pool {
    pub(crate) handle: usize,
    pub(crate) ordinal: usize,
    /// Settings, which change nothing.
    settings: Mutex<HashMap<u32, u64>>,
}

impl Pool {
    /// A new pool of a device.
    pub(crate) fn register(ordinal: usize) -> Arc<Pool> {
        let pool = Arc::new(Pool { handle: handles::fresh(), ordinal, settings: Mutex::default() });
        POOLS.insert(pool.handle, pool.clone());
        pool
    }

    fn used(&self) -> u64 {
        allocations().values().filter(|one| one.kind == Kind::Pool(self.handle)).map(|one| one.bytes as u64).sum()
    }
}

/// Returns true for the attributes that allow memory to be used again: they have 32 bits, the others 64.
fn is_short(attribute: CUmemPool_attribute) -> bool {
    use CUmemPool_attribute as A;
    matches!(
        attribute,
        A::CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES
            | A::CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC
            | A::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES
    )
}

/// The ordinal of a device's location.
fn located(location: &CUmemLocation) -> Answer<usize> {
    ensure(location.type_ == CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, CUresult::CUDA_ERROR_NOT_SUPPORTED)?;
    Ok(device(location.id)?.ordinal)
}

calls! {
    fn cuDeviceGetDefaultMemPool(to: *mut CUmemoryPool, which: CUdevice) {
        put(to, handles::pointer(device(which)?.pool.handle))
    }

    fn cuDeviceGetMemPool(to: *mut CUmemoryPool, which: CUdevice) {
        put(to, handles::pointer(lock(&device(which)?.current_pool).handle))
    }

    fn cuDeviceSetMemPool(which: CUdevice, pool: CUmemoryPool) {
        let (device, pool) = (device(which)?, POOLS.get(pool)?);
        ensure(pool.ordinal == device.ordinal, CUresult::CUDA_ERROR_INVALID_DEVICE)?;
        *lock(&device.current_pool) = pool;
        Ok(())
    }

    fn cuMemPoolCreate(to: *mut CUmemoryPool, wanted: *const CUmemPoolProps) {
        ensure(!wanted.is_null(), CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let ordinal = located(&(*wanted).location)?;
        put(to, handles::pointer(Pool::register(ordinal).handle))
    }

    fn cuMemPoolDestroy(pool: CUmemoryPool) { POOLS.remove(pool).map(|_| ()) }

    fn cuMemPoolTrimTo(pool: CUmemoryPool, _: usize) { POOLS.get(pool).map(|_| ()) }

    fn cuMemPoolGetAttribute(pool: CUmemoryPool, attribute: CUmemPool_attribute, to: *mut c_void) {
        use CUmemPool_attribute as A;
        let pool = POOLS.get(pool)?;
        let value = match attribute {
            A::CU_MEMPOOL_ATTR_USED_MEM_CURRENT | A::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT => pool.used(),
            _ => lock(&pool.settings).get(&(attribute as u32)).copied().unwrap_or(0),
        };
        if is_short(attribute) { put(to.cast(), value as u32) } else { put(to.cast(), value) }
    }

    fn cuMemPoolSetAttribute(pool: CUmemoryPool, attribute: CUmemPool_attribute, from: *mut c_void) {
        ensure(!from.is_null(), CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let short = is_short(attribute);
        let value = if short { u64::from(from.cast::<u32>().read()) } else { from.cast::<u64>().read() };
        lock(&POOLS.get(pool)?.settings).insert(attribute as u32, value);
        Ok(())
    }

    fn cuMemPoolSetAccess(pool: CUmemoryPool, list: *const CUmemAccessDesc, count: usize) {
        let pool = POOLS.get(pool)?;
        ensure(!list.is_null() || count == 0, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        for one in (0..count).map(|i| &*list.add(i)) {
            ensure(located(&one.location)? == pool.ordinal, CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)?;
        }
        Ok(())
    }

    fn cuMemPoolGetAccess(to: *mut CUmemAccess_flags, pool: CUmemoryPool, location: *mut CUmemLocation) {
        ensure(!location.is_null(), CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let own = POOLS.get(pool)?.ordinal == located(&*location)?;
        let flags = if own {
            CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        } else {
            CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE
        };
        put(to, flags)
    }
}
