//! The decision for every answer that a kernel can give, from a simulated device.

use std::cell::RefCell;

use proptest::prelude::*;

use super::*;
use crate::buffer::host::HostBuffer;

/// A buffer with preset answers; its memory is a host buffer's.
struct Played {
    memory: HostBuffer,
    export: Result<(), Why>,
    pointer: Result<u64, Why>,
    gpudirect: Result<(), Why>,
}

impl Memory for Played {
    fn len(&self) -> usize {
        self.memory.len()
    }

    fn address(&self) -> u64 {
        self.memory.address()
    }

    fn export(&self) -> Result<Export, Why> {
        self.export.clone()?;
        let fd = std::fs::File::open("/dev/null").expect("opens").into();
        Ok(Export { fd, offset: 4096, source: "GPU 7".to_owned() })
    }

    fn device_pointer(&self) -> Result<u64, Why> {
        self.pointer.clone()
    }

    fn gpudirect(&self) -> Result<(), Why> {
        self.gpudirect.clone()
    }

    fn pinned(&self, len: usize) -> Result<Pinned> {
        self.memory.pinned(len)
    }

    fn owner(&self) -> Arc<dyn Any + Send + Sync> {
        self.memory.owner()
    }
}

/// A device that answers with preset errnos; 0 is success. A registration is the name of the call that made it.
struct Answers {
    ask: i32,
    dmabuf: i32,
    pointer: i32,
    host: i32,
    in_user_space: bool,
    calls: RefCell<Vec<String>>,
}

const POINTER: u64 = 0x7f00_dead_0000;

impl Device for Answers {
    type Mr = String;

    fn name(&self) -> &str {
        "mlx5_9"
    }

    fn is_in_user_space(&self) -> bool {
        self.in_user_space
    }

    fn ask_dmabuf(&self) -> io::Error {
        self.calls.borrow_mut().push("ask".to_owned());
        io::Error::from_raw_os_error(self.ask)
    }

    fn reg_dmabuf_mr(
        &self,
        _: BorrowedFd<'_>,
        range: (u64, usize),
        _: u64,
        _: Arc<dyn Any + Send + Sync>,
    ) -> io::Result<String> {
        self.answer(format!("dmabuf {range:?}"), self.dmabuf)
    }

    fn reg_mr(&self, address: u64, _: usize, _: Arc<dyn Any + Send + Sync>) -> io::Result<String> {
        if address == POINTER {
            self.answer("pointer".to_owned(), self.pointer)
        } else {
            self.answer("host".to_owned(), self.host)
        }
    }
}

impl Answers {
    fn answer(&self, call: String, errno: i32) -> io::Result<String> {
        self.calls.borrow_mut().push(call.clone());
        if errno == 0 { Ok(call) } else { Err(io::Error::from_raw_os_error(errno)) }
    }
}

fn gpu() -> Played {
    let memory = HostBuffer::new(8192, None).expect("memory");
    Played { memory, export: Ok(()), pointer: Ok(POINTER), gpudirect: Ok(()) }
}

fn willing() -> Answers {
    Answers { ask: libc::EBADF, dmabuf: 0, pointer: 0, host: 0, in_user_space: false, calls: RefCell::default() }
}

fn no_rdma() -> Why {
    Why::new("no RDMA device here", "buy one")
}

fn probe<'a>(buffer: &'a Played, device: Result<&'a Answers, Why>) -> Probe<'a, Played, Answers> {
    Probe { buffer, device, peer_module: None, staging: 4096 }
}

fn taken(outcome: &Outcome<String>) -> Option<Stage> {
    outcome.taken.as_ref().map(|(stage, _)| *stage)
}

/// The reason why `stage` was not taken.
fn why(outcome: &Outcome<String>, stage: Stage) -> String {
    let line = outcome.lines.iter().find(|line| line.stage == stage).expect("a line per stage");
    match &line.outcome {
        Some(Err(why)) => why.to_string(),
        other => panic!("{stage}: {other:?}"),
    }
}

#[test]
fn the_first_that_works_is_taken_and_nothing_after_it_is_tried() {
    let (buffer, device) = (gpu(), willing());
    let outcome = run(&probe(&buffer, Ok(&device)), None).expect("a way");
    assert!(matches!(&outcome.taken, Some((Stage::Dmabuf, Path::Direct(mr))) if mr == "dmabuf (4096, 8192)"));
    assert_eq!(*device.calls.borrow(), ["ask", "dmabuf (4096, 8192)"]);
    assert!(outcome.lines[1..].iter().all(|line| line.outcome.is_none()));
}

#[test]
fn a_driver_that_imports_no_dmabuf_leads_to_peer_memory() {
    for errno in [libc::EOPNOTSUPP, libc::EPROTONOSUPPORT, libc::ENOSYS] {
        let (buffer, device) = (gpu(), Answers { ask: errno, ..willing() });
        let outcome = run(&probe(&buffer, Ok(&device)), None).expect("a way");
        assert!(matches!(&outcome.taken, Some((Stage::PeerMemory, Path::Direct(mr))) if mr == "pointer"));
        let text = why(&outcome, Stage::Dmabuf);
        assert!(text.contains("GPU 7 exports the buffer") && text.contains(&format!("({errno}, ")), "{text}");
        assert_eq!(*device.calls.borrow(), ["ask", "pointer"], "no import is tried");
    }
}

#[test]
fn peer_memory_without_the_module_says_which_to_load() {
    let (buffer, device) = (gpu(), Answers { dmabuf: libc::EINVAL, pointer: libc::EFAULT, ..willing() });
    let mut asked = probe(&buffer, Ok(&device));
    let outcome = run(&asked, None).expect("a way");
    assert!(
        matches!(&outcome.taken, Some((Stage::Staging, Path::Staged(slots, Some(mr)))) if slots.len() == 4096 && mr == "host")
    );
    assert!(why(&outcome, Stage::Dmabuf).contains("EINVAL"));
    let text = why(&outcome, Stage::PeerMemory);
    assert!(text.contains("EFAULT (14, Bad address)") && text.contains("modprobe nvidia_peermem"), "{text}");
    asked.peer_module = Some("nvidia_peermem");
    let text = why(&run(&asked, None).expect("a way"), Stage::PeerMemory);
    assert!(text.contains("nvidia_peermem is loaded") && text.contains("after the RDMA driver"), "{text}");
}

#[test]
fn a_gpu_without_gpudirect_is_for_a_card_in_user_space_alone() {
    let buffer = Played { gpudirect: Err(Why::new("a GeForce", "another")), ..gpu() };
    let real = Answers { ask: libc::EOPNOTSUPP, ..willing() };
    let outcome = run(&probe(&buffer, Ok(&real)), None).expect("a way");
    assert_eq!(taken(&outcome), Some(Stage::Staging));
    assert_eq!(why(&outcome, Stage::PeerMemory), "a GeForce; another");
    let ours = Answers { in_user_space: true, ..real };
    let outcome = run(&probe(&buffer, Ok(&ours)), None).expect("a way");
    assert_eq!(taken(&outcome), Some(Stage::PeerMemory));
    let said = outcome.lines[1].outcome.as_ref().expect("tried").as_ref().expect("taken");
    assert!(said.contains("copies the bytes of each packet") && !said.contains("nvidia_peermem"), "{said}");
}

#[test]
fn without_a_device_the_gpus_half_is_still_told() {
    let buffer = gpu();
    let outcome = run(&probe(&buffer, Err(no_rdma())), None).expect("a way");
    assert!(matches!(&outcome.taken, Some((Stage::Staging, Path::Staged(_, None)))));
    let text = why(&outcome, Stage::Dmabuf);
    assert!(
        text.contains("GPU 7 exports the buffer, but there is nothing to import it: no RDMA device here"),
        "{text}"
    );
    assert!(text.ends_with("; buy one"), "{text}");
    assert!(why(&outcome, Stage::PeerMemory).contains("nvidia_peermem is not loaded"));
}

#[test]
fn without_a_gpu_each_reason_is_the_buffers() {
    let buffer =
        Played { export: Err(Why::new("no exporter", "load one")), pointer: Err(Why::new("host", "gpu")), ..gpu() };
    for device in [Ok(&willing()), Ok(&Answers { ask: libc::EOPNOTSUPP, ..willing() }), Err(no_rdma())] {
        let outcome = run(&probe(&buffer, device), None).expect("a way");
        assert_eq!(taken(&outcome), Some(Stage::Staging));
        assert!(why(&outcome, Stage::Dmabuf).starts_with("no exporter"));
        assert_eq!(why(&outcome, Stage::PeerMemory), "host; gpu");
    }
}

#[test]
fn a_forced_stage_is_the_only_one_that_is_tried() {
    let (buffer, device) = (gpu(), Answers { ask: libc::EOPNOTSUPP, ..willing() });
    let outcome = run(&probe(&buffer, Ok(&device)), Some(Stage::Dmabuf)).expect("an outcome");
    assert_eq!(taken(&outcome), None);
    assert_eq!(*device.calls.borrow(), ["ask"]);
    let outcome = run(&probe(&buffer, Ok(&device)), Some(Stage::Staging)).expect("a way");
    assert_eq!(taken(&outcome), Some(Stage::Staging));
    assert!(outcome.lines[..2].iter().all(|line| line.outcome.is_none()));
}

#[test]
fn too_little_lockable_memory_is_an_error_that_says_so() {
    let (buffer, device) = (gpu(), Answers { host: libc::ENOMEM, ..willing() });
    let error = run(&probe(&buffer, Ok(&device)), Some(Stage::Staging)).expect_err("no memory").to_string();
    assert!(error.contains("ENOMEM") && error.contains("ulimit -l") && error.contains("mlx5_9"), "{error}");
}

#[test]
fn the_modules_folder_tells_which_is_loaded() {
    let sys = std::env::temp_dir().join(format!("cuda-verbs-{}", std::process::id()));
    std::fs::create_dir_all(sys.join("nv_peer_mem")).expect("a folder");
    assert_eq!(peer_memory::loaded_module(&sys), Some("nv_peer_mem"));
    std::fs::create_dir_all(sys.join("nvidia_peermem")).expect("a folder");
    assert_eq!(peer_memory::loaded_module(&sys), Some("nvidia_peermem"));
    std::fs::remove_dir_all(&sys).expect("removed");
    assert_eq!(peer_memory::loaded_module(&sys), None);
}

proptest! {
    /// For all answers: the report has one line per stage, the probe takes the first that works, and every other tried
    /// one has a reason and a next step.
    #[test]
    fn any_answers(
        ask in prop::sample::select(vec![libc::EBADF, libc::EOPNOTSUPP, libc::EPERM]),
        dmabuf in 0..40,
        pointer in 0..40,
        (exports, points, device) in any::<(bool, bool, bool)>(),
    ) {
        let reason = || Why::new("a reason", "a step");
        let buffer = Played { export: exports.then_some(()).ok_or_else(reason), pointer: points.then_some(POINTER).ok_or_else(reason), ..gpu() };
        let answers = Answers { ask, dmabuf, pointer, ..willing() };
        let outcome = run(&probe(&buffer, if device { Ok(&answers) } else { Err(no_rdma()) }), None).expect("staging works");
        let expected = if device && exports && ask != libc::EOPNOTSUPP && dmabuf == 0 {
            Stage::Dmabuf
        } else if device && points && pointer == 0 {
            Stage::PeerMemory
        } else {
            Stage::Staging
        };
        prop_assert_eq!(taken(&outcome), Some(expected));
        prop_assert_eq!(outcome.lines.len(), 3);
        for line in &outcome.lines {
            match &line.outcome {
                Some(Ok(how)) => prop_assert!(line.stage == expected && !how.is_empty()),
                Some(Err(why)) => prop_assert!(!why.reason.is_empty() && !why.next.is_empty()),
                None => {}
            }
        }
    }
}
