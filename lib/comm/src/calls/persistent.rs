//! Registered buffers: caller's memory that RDMA devices send without a copy.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::Comm;
use tinynccl_plan::dtype::Element;
use tinynccl_plan::error::Result;
use tinynccl_transport::Registration;

/// A buffer that stays registered with the RDMA devices of this rank for as long as it exists.
///
/// Use it as a slice (`&buffer[..]`, `&mut buffer`): calls recognise it, and any part of it. Over other transports it
/// is an ordinary buffer.
///
/// It owns the elements so that a registration never outlives its pages. A registration belongs to pages, not to an
/// address. If registered memory could be freed, new memory at the same address would be taken for it, and the device
/// would send the old pages. [`Persistent::into_inner`] and dropping end the registration before the elements can be
/// freed, grown or replaced. `std::mem::forget` leaks both. A guard that borrows the memory would not suffice:
/// forgetting the guard would leave a registration of memory that may be freed.
///
/// ```
/// # extern crate tinynccl_comm as tinynccl;
/// # fn f(comm: &tinynccl::Comm) -> tinynccl::Result<()> {
/// let mut gradients = comm.register_persistent(vec![0f32; 1 << 20])?;
/// for _ in 0..100 {
///     gradients.fill(1.0);
///     comm.all_reduce_in_place(&mut gradients, tinynccl::ReduceOp::Sum)?;
/// }
/// let gradients: Vec<f32> = gradients.into_inner();
/// # Ok(()) }
/// ```
///
/// The compiler sees to it that the elements stay where they are. This is right:
/// ```
/// # extern crate tinynccl_comm as tinynccl;
/// # fn f(comm: &tinynccl::Comm) -> tinynccl::Result<()> {
/// let elements = vec![0f32; 1024];
/// let buffer = comm.register_persistent(elements)?;
/// let work = comm.all_reduce_in_place_async(buffer, tinynccl::ReduceOp::Sum)?;
/// let mut buffer = work.wait()?;
/// buffer[0] = 1.0;
/// comm.group(|group| group.send(&buffer, 1))?;
/// let elements = buffer.into_inner();
/// drop(elements);
/// # Ok(()) }
/// ```
/// Each of these is refused: elements that are freed while they are registered,
/// ```compile_fail,E0382
/// # extern crate tinynccl_comm as tinynccl;
/// # fn f(comm: &tinynccl::Comm) -> tinynccl::Result<()> {
/// let elements = vec![0f32; 1024];
/// let buffer = comm.register_persistent(elements)?;
/// drop(elements);
/// # comm.group(|group| group.send(&buffer, 1)) }
/// ```
/// or written while an asynchronous call has them,
/// ```compile_fail,E0382
/// # extern crate tinynccl_comm as tinynccl;
/// # fn f(comm: &tinynccl::Comm) -> tinynccl::Result<()> {
/// let mut buffer = comm.register_persistent(vec![0f32; 1024])?;
/// let work = comm.all_reduce_in_place_async(buffer, tinynccl::ReduceOp::Sum)?;
/// buffer[0] = 1.0;
/// # work.wait().map(drop) }
/// ```
/// a buffer that does not live until its group ends, when its call runs,
/// ```compile_fail,E0597
/// # extern crate tinynccl_comm as tinynccl;
/// # fn f(comm: &tinynccl::Comm) -> tinynccl::Result<()> {
/// comm.group(|group| {
///     let buffer = comm.register_persistent(vec![0f32; 1024])?;
///     group.send(&buffer, 1)
/// })
/// # }
/// ```
/// and one whose registration has ended.
/// ```compile_fail,E0382
/// # extern crate tinynccl_comm as tinynccl;
/// # fn f(comm: &tinynccl::Comm) -> tinynccl::Result<()> {
/// let buffer = comm.register_persistent(vec![0f32; 1024])?;
/// let elements = buffer.into_inner();
/// comm.group(|group| group.send(&buffer, 1))?;
/// # Ok(drop(elements)) }
/// ```
pub struct Persistent<T: Element> {
    // Fields are dropped in this order: the registration goes first.
    registration: Option<Registration>,
    data: Vec<T>,
}

impl<T: Element> Persistent<T> {
    /// Returns true if the memory is registered. If not, it is like any other buffer.
    pub fn is_registered(&self) -> bool {
        self.registration.is_some()
    }

    /// Ends the registration and gives the elements back.
    pub fn into_inner(self) -> Vec<T> {
        // Dropped here, before the caller gets the elements.
        let Persistent { registration: _registration, data } = self;
        data
    }
}

impl<T: Element> Deref for Persistent<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.data
    }
}

impl<T: Element> DerefMut for Persistent<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.data
    }
}

impl<T: Element> fmt::Debug for Persistent<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Persistent of {} {} (registered: {})", self.data.len(), T::DTYPE, self.is_registered())
    }
}

impl Comm {
    /// Registers the elements with every RDMA device that this rank uses. The devices then send messages of 4 KiB and
    /// more without a copy at the sender. Registering pins the pages and costs a system call and time per page: do it
    /// once for a buffer that many calls use. It is local (no other rank needs to call it) and holds for all
    /// communicators made from the same rendezvous.
    ///
    /// Calls take the buffer as they take any slice; asynchronous calls take it whole. Received data, and data reduced
    /// on its way, still pass through a slot of the link.
    ///
    /// If links are not RDMA (`TINYNCCL_TRANSPORT` is not `verbs`), nothing is registered; the log says so once per
    /// buffer.
    ///
    /// # Errors
    /// [`Error::Os`](tinynccl_plan::Error::Os) when a device refuses, most often for the limit of locked memory, which
    /// it then names. The elements are dropped.
    pub fn register_persistent<T: Element>(&self, mut elements: Vec<T>) -> Result<Persistent<T>> {
        let state = &self.inner.state;
        state.check(|| "register_persistent".to_owned())?;
        let bytes = std::mem::size_of_val(&elements[..]);
        let base = NonNull::from(&mut elements[..]).cast::<u8>();
        let registration = match bytes {
            0 => None,
            // SAFETY: `Persistent` keeps the elements where they are, and drops the registration before them.
            _ => unsafe { self.register(base, bytes) }?,
        };
        if registration.is_none() {
            log::info!("rank {}: a persistent buffer of {bytes} bytes needs no registration here", state.rank);
        }
        Ok(Persistent { registration, data: elements })
    }
}

impl Comm {
    /// Registers memory with the devices that carry the links; `None` without such devices.
    ///
    /// # Safety
    /// The memory must stay allocated, at its place, until the registration is dropped.
    pub unsafe fn register(&self, base: NonNull<u8>, bytes: usize) -> Result<Option<Registration>> {
        // SAFETY: forwarded from the caller.
        unsafe { self.inner.state.control.register(base, bytes) }
    }
}

pub(crate) mod sealed {
    pub trait Sealed {}
}

/// The buffer that an asynchronous call takes and gives back. It owns its elements, whose address does not change when
/// the buffer is moved.
pub trait OwnedBuffer: sealed::Sealed + DerefMut<Target = [Self::Element]> + Send + 'static {
    /// Type of the elements.
    type Element: Element;
}

impl<T: Element> sealed::Sealed for Vec<T> {}
impl<T: Element> OwnedBuffer for Vec<T> {
    type Element = T;
}

impl<T: Element> sealed::Sealed for Persistent<T> {}
impl<T: Element> OwnedBuffer for Persistent<T> {
    type Element = T;
}
