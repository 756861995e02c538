//! The kernels: *families* (operations), each with its *framings* (how data cross the link).
//!
//! | file | idea |
//! | --- | --- |
//! | this one | the table of all kernels, and their sources |
//! | `cache` | kernels compiled and loaded, by device |
//! | `args` | the arguments of a kernel, and its launch |

mod args;
mod cache;

#[cfg(test)]
pub(crate) use args::mirrored;
pub(crate) use args::{Args, Remote, THREADS, Team, launch, launch_with};
pub(crate) use cache::{Function, Kernels};

use super::window::Layout;
use tinynccl_plan::dtype::{DType, ReduceOp};
use tinynccl_plan::wire::Collective;

/// Framing of data that cross the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Framing {
    /// Slots, with a counter behind the data.
    Simple,
    /// Lines, with flags beside the data.
    Ll,
    Ll128,
    /// From one rank's buffer into another's.
    Direct,
}

impl Framing {
    fn name(self) -> &'static str {
        match self {
            Framing::Simple => "simple",
            Framing::Ll => "ll",
            Framing::Ll128 => "ll128",
            Framing::Direct => "direct",
        }
    }
}

/// One function of the sources.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Kernel {
    pub(crate) family: Family,
    pub(crate) framing: Framing,
}

/// Work of a family: one that combines values is compiled for an element type and an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    Reduces,
    Moves,
    /// Depends on the collective.
    Either,
}

/// A kernel's sources, after [`COMMON`]. A file may have several kernels, each inside `#ifdef KERNEL_` and its name: a
/// call compiles the one that it needs.
#[derive(Debug, Clone, Copy)]
struct Source {
    files: &'static str,
    text: &'static str,
}

/// Files of this folder, one behind the other.
macro_rules! text {
    ($($file:literal)+) => { concat!($(include_str!($file)),+) };
}

/// The framings of a family that have the same files, and these.
type Sources = &'static [(&'static [Framing], Source)];

macro_rules! families {
    ($($family:ident $name:literal $work:ident: $([$($framing:ident)+] $($file:literal)+),+;)*) => {
        /// A kernel's operation.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub(crate) enum Family { $($family),* }

        impl Family {
            fn row(self) -> (&'static str, Work, Sources) {
                match self {
                    $(Family::$family => ($name, Work::$work, &[$((
                        &[$(Framing::$framing),+],
                        Source { files: concat!($($file, " "),+), text: text!($($file)+) },
                    )),+])),*
                }
            }
        }

        impl Kernel {
            #[cfg(test)]
            const ALL: &[Kernel] =
                &[$($($(Kernel { family: Family::$family, framing: Framing::$framing }),+),+),*];
        }
    };
}

families! {
    AllReduceDirect "all_reduce_direct" Reduces:
        [Direct] "reduce_slots.cuh" "reduce_buffers.cuh" "reduce_scatter.cu";
    AllReduceTwoShot "all_reduce_two_shot" Reduces:
        [Simple] "reduce_slots.cuh" "all_reduce_two_shot.cu",
        [Ll Ll128] "reduce_slots.cuh" "all_reduce_two_shot_ll.cu";
    ReduceScatter "reduce_scatter" Reduces:
        [Simple Ll Ll128] "reduce_slots.cuh" "reduce_lines.cuh" "reduce_scatter.cu",
        [Direct] "reduce_slots.cuh" "reduce_buffers.cuh" "reduce_scatter.cu";
    Reduce "reduce" Reduces:
        [Simple Ll Ll128] "reduce_slots.cuh" "reduce_lines.cuh" "reduce.cu",
        [Direct] "reduce_slots.cuh" "reduce_buffers.cuh" "reduce.cu";
    ReduceTwoShot "reduce_two_shot" Reduces:
        [Ll Ll128] "reduce_slots.cuh" "reduce_two_shot_ll.cu";
    Broadcast "broadcast" Moves:
        [Simple Ll Ll128 Direct] "move_lines.cuh" "broadcast.cu";
    Exchange "exchange" Moves:
        [Simple Ll Ll128 Direct] "move_lines.cuh" "exchange.cu";
    Fused "fused" Either: [Ll] "reduce_slots.cuh" "reduce_lines.cuh" "move_lines.cuh" "fused.cu";
    SendRecv "send_recv" Moves: [Simple] "send_recv.cu";
    Signal "signal" Moves: [Simple] "signal.cu";
    SignalWait "signal_wait" Moves: [Simple] "signal.cu";
    Schedule "schedule" Either: [Simple Ll Ll128] "primitives.cuh" "schedule.cu";
    PhasedPush "phased_push" Moves: [Simple] "phased.cu";
    PhasedTake "phased_take" Moves: [Simple] "phased.cu";
    PhasedSignal "phased_signal" Moves: [Simple] "phased.cu";
    PhasedCompare "phased_compare" Moves: [Simple] "phased.cu";
    PhasedReduce "phased_reduce" Reduces: [Simple] "reduce_slots.cuh" "phased.cu";
}

/// CUDA C of an element type, for a unit that [`compile`](crate::compile()) gets with `-DDTYPE=` the code of a
/// [`DType`], `-DOP=0` and `-DRANKS=1`: the types `Stored` and `Acc`, and `widen` and `narrow` between them, which
/// round as the collectives do.
pub const ELEMENTS: &str = include_str!("types.cuh");

/// Ahead of every kernel's own files.
const COMMON: &str = text!("types.cuh" "exact.cuh" "memory.cuh" "subgroups.cuh" "team.cuh" "args.cuh" "ll.cuh" "ll128.cuh" "fifo.cuh"
    "pieces.cuh" "direct.cuh");

/// Element type and operator of a kernel that combines values.
pub(crate) type Types = Option<(DType, ReduceOp)>;

impl Kernel {
    pub(crate) fn new(family: Family, framing: Framing) -> Kernel {
        Kernel { family, framing }
    }

    /// The function's name: the family's and the framing's, or the family's alone where it has one framing.
    fn name(self) -> String {
        let (name, _, sources) = self.family.row();
        match sources {
            [([_], _)] => name.to_owned(),
            _ => format!("{name}_{}", self.framing.name()),
        }
    }

    fn source(self) -> Option<Source> {
        let (_, _, sources) = self.family.row();
        sources.iter().find(|(framings, _)| framings.contains(&self.framing)).map(|(_, source)| *source)
    }

    /// Returns true if the family has this framing.
    pub(crate) fn exists(self) -> bool {
        self.source().is_some()
    }

    /// Returns true if the kernel combines values in a call of `collective`.
    pub(crate) fn reduces(self, collective: Collective) -> bool {
        match self.family.row().1 {
            Work::Reduces => true,
            Work::Moves => false,
            Work::Either => collective.reduces(),
        }
    }
}

/// Name and text of a kernel's source, and the compiler's definitions; `None` where there is no such kernel.
fn unit(layout: &Layout, kernel: Kernel, types: Types) -> Option<(String, String, Vec<String>)> {
    let source = kernel.source()?;
    let mut defines = layout.defines();
    defines.push(format!("-DTHREADS={THREADS}"));
    defines.push(format!("-DKERNEL_{}", kernel.name()));
    let mut name = format!("{} ({})", kernel.name(), source.files.trim_end());
    if let Some((dtype, op)) = types {
        defines.push(format!("-DDTYPE={}", dtype as u8));
        defines.push(format!("-DOP={}", op as u8));
        name.push_str(&format!(" of {dtype}, {op}"));
    }
    Some((name, [COMMON, source.text].concat(), defines))
}

#[cfg(test)]
mod tests {
    use super::super::driver::compile::compile;
    use super::*;
    use tinynccl_plan::Error;
    use tinynccl_sys::Config;
    use tinynccl_sys::config::Sums;

    #[test]
    fn every_kernel_is_in_its_source_once() {
        for kernel in Kernel::ALL {
            let text = kernel.source().unwrap().text;
            // In its own line or behind its type: reduce_direct is another than all_reduce_direct.
            let begins = ["\n", "void "]
                .map(|before| text.matches(&format!("{before}{}(const __grid_constant__ ", kernel.name())).count());
            assert_eq!(begins.iter().sum::<usize>(), 1, "{kernel:?}");
            assert_eq!(text.matches(&format!("#ifdef KERNEL_{}\n", kernel.name())).count(), 1, "{kernel:?}");
        }
    }

    /// Else a kernel would run before what it reads is written.
    #[test]
    fn every_kernel_awaits_the_one_before_it() {
        for kernel in Kernel::ALL {
            let text = kernel.source().unwrap().text;
            let begin = text.find(&format!("{}(const __grid_constant__ ", kernel.name())).unwrap();
            let body = &text[begin..begin + text[begin..].find("\n}\n").unwrap()];
            let awaits = ["await_kernel_before()", "enter(", "one_call<", "two_shot_lines<"];
            assert!(awaits.iter().any(|call| body.contains(call)), "{}: {body}", kernel.name());
        }
        assert!(COMMON.contains("enter(const Team& team) {\n    await_kernel_before();"));
    }

    fn unit_defines(layout: &Layout) -> Vec<String> {
        [layout.defines(), vec![format!("-DTHREADS={THREADS}")]].concat()
    }

    /// Its PTX; `None` where there is no compiler.
    fn compiled(name: &str, text: &str, defines: &[String]) -> Option<String> {
        match compile(name, text, defines, (9, 0)) {
            Ok(ptx) => Some(ptx.to_src()),
            Err(error @ Error::Unsupported { .. }) => {
                eprintln!("SKIPPED: compiling {name}: {error}");
                None
            }
            Err(error) => panic!("{name}: {error}"),
        }
    }

    /// Compiles for Hopper: each element type, each operator, and one kernel at a time. NVRTC needs no GPU.
    #[test]
    fn every_source_compiles() {
        let layout = Layout::new(4, 1, &Config::default());
        let all = DType::ALL.into_iter().enumerate().map(|(i, dtype)| {
            let ops: Vec<ReduceOp> = ReduceOp::ALL.into_iter().filter(|op| op.applies_to(dtype)).collect();
            Some((dtype, ops[i % ops.len()]))
        });
        let all: Vec<Types> = all.collect();
        let two = Layout::new(2, 1, &Config::default()).without_ll128();
        for kernel in Kernel::ALL {
            let types = match kernel.family.row().1 {
                Work::Reduces => all.clone(),
                Work::Moves => vec![None],
                Work::Either => [vec![None], all.clone()].concat(),
            };
            for types in types {
                // Between two ranks, with one type for all.
                let again = types.is_none_or(|(dtype, _)| dtype == DType::F32).then_some(&two);
                for layout in [Some(&layout), again].into_iter().flatten() {
                    let (name, text, defines) = unit(layout, *kernel, types).unwrap();
                    let Some(ptx) = compiled(&name, &text, &defines) else { return };
                    let entries: Vec<&str> = ptx.lines().filter(|line| line.contains(".entry ")).collect();
                    assert!(
                        matches!(entries[..], [one] if one.contains(&format!(" {}(", kernel.name()))),
                        "{name}: {entries:?}"
                    );
                }
            }
        }
    }

    /// Exact sums among a few numbers of ranks; two of them may take a schedule.
    #[test]
    fn kernels_of_exact_sums_compile() {
        for ranks in [2, 3, 8] {
            let layout = Layout::new(ranks, 1, &Config::default().with(|c| c.sum = Sums::Exact));
            for kernel in Kernel::ALL.iter().filter(|kernel| kernel.reduces(Collective::AllReduce)) {
                if kernel.family == Family::Schedule && ranks > 2 || kernel.framing == Framing::Ll128 && ranks != 4 {
                    continue;
                }
                for dtype in [DType::F32, DType::Bf16, DType::F16] {
                    let op = if (ranks + dtype as usize).is_multiple_of(2) { ReduceOp::Sum } else { ReduceOp::Avg };
                    let (name, text, defines) = unit(&layout, *kernel, Some((dtype, op))).unwrap();
                    assert!(defines.iter().any(|define| define == "-DEXACT_SUMS"));
                    if compiled(&name, &text, &defines).is_none() {
                        return;
                    }
                }
            }
        }
    }

    /// The host's places in windows and their extensions are the kernels'.
    #[test]
    fn windows_are_laid_out_alike() {
        use crate::window::places;
        let few = Config::default().with(|c| {
            c.cuda_blocks = 3;
            c.cuda_slot = 5000;
        });
        for ranks in [2, 3, 8] {
            for layout in [Layout::new(ranks, 1, &Config::default()), Layout::new(ranks, 1, &few)] {
                for layout in [layout, layout.without_ll128()] {
                    let asserts: String = places(&layout)
                        .iter()
                        .map(|(what, place)| format!("static_assert({what} == {place}, \"the host has {place}\");\n"))
                        .collect();
                    if compiled(
                        &format!("{layout:?}"),
                        &[text!("types.cuh" "team.cuh"), &asserts].concat(),
                        &unit_defines(&layout),
                    )
                    .is_none()
                    {
                        return;
                    }
                }
            }
        }
    }

    /// The host's structs match the kernels': sizes, and offsets of the fields.
    #[test]
    fn structs_are_laid_out_alike() {
        use super::super::calls::one_sided;
        use super::super::path::report;
        use super::super::start::path_check;
        use super::super::{peer, phased};
        let files = [
            (text!("primitives.cuh"), [args::layouts(), peer::layouts(), report::layouts()].concat()),
            (text!("send_recv.cu"), peer::pair_layouts()),
            (text!("move_lines.cuh" "fused.cu"), peer::fused_layouts()),
            (text!("phased.cu"), phased::layouts()),
            (text!("signal.cu"), one_sided::layouts()),
            (text!("path_check.cu"), path_check::layouts()),
        ];
        for (i, (text, layouts)) in files.into_iter().enumerate() {
            let asserts: String = layouts
                .iter()
                .map(|(what, bytes)| format!("static_assert({what} == {bytes}, \"the host has {bytes}\");\n"))
                .collect();
            let defines = unit_defines(&Layout::new(4, 1, &Config::default()));
            if compiled(&format!("layouts {i}"), &[COMMON, text, &asserts].concat(), &defines).is_none() {
                return;
            }
        }
    }
}
