//! Speed of the reduction kernels: GB/s of output of one thread, by element type, instruction set and size.
//!
//! `cargo bench -p tinynccl --bench reduce -- [OPERATION] [DTYPE ...]`
//!
//! OPERATION is one of: sum (the default), prod, min, max, avg (an input times 1/3, or a sum over 3), dual (sum to two
//! places), in-place (sum over the second operand), four (sum of four operands, two at a time through 8 KiB, as in the
//! shared region), exact (the same rounded once, at the machine's level). The first row is `memcpy`, what the machine
//! can do without arithmetic.

use std::hint::black_box;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use tinynccl::reduce::{self, Exact, Kernels, Level};
use tinynccl::{DType, ReduceOp};

/// Bytes of one operand.
const SIZES: [usize; 3] = [64 << 10, 1 << 20, 32 << 20];
/// Bytes of the piece through which the shared region adds more than two operands.
const PIECE: usize = 8 << 10;
/// Timed repetitions, of which the median counts.
const REPETITIONS: usize = 15;
/// Least time of one repetition: small sizes are called many times in one.
const REPETITION: Duration = Duration::from_millis(4);

#[derive(Clone, Copy)]
enum Operation {
    Reduce(ReduceOp),
    Average,
    Dual,
    InPlace,
    Four,
    Exact,
}

impl Operation {
    fn parse(name: &str) -> Option<Operation> {
        Some(match name {
            "avg" => Operation::Average,
            "dual" => Operation::Dual,
            "in-place" => Operation::InPlace,
            "four" => Operation::Four,
            "exact" => Operation::Exact,
            _ => Operation::Reduce(name.parse().ok()?),
        })
    }

    fn op(self) -> ReduceOp {
        match self {
            Operation::Reduce(op) => op,
            Operation::Four | Operation::Exact => ReduceOp::Sum,
            _ => ReduceOp::Avg,
        }
    }

    fn run(self, kernels: &Kernels, exact: Option<&Exact>, buffers: &mut Buffers, (n, size): (usize, usize)) {
        let Buffers { a, b, out, copy, more } = buffers;
        let four = [&*a, &*b, &more[0], &more[1]].map(|operand| operand.as_ptr().cast::<u8>());
        let (a, b, b_mut) = (a.as_ptr().cast(), b.as_ptr().cast(), b.as_mut_ptr().cast());
        let (out, copy) = (out.as_mut_ptr().cast(), copy.as_mut_ptr().cast());
        // SAFETY: `n` elements are at most the size of the buffers, which are aligned for every element.
        unsafe {
            match self {
                Operation::Reduce(_) => (kernels.reduce)(a, b, out, n),
                Operation::Average => {
                    kernels.scale.into_iter().for_each(|scale| scale(a, out, n, 1.0 / 3.0));
                    kernels.divide.into_iter().for_each(|divide| divide(out, n, 3));
                }
                Operation::Dual => (kernels.reduce_dual)(a, b, out, copy, n),
                Operation::InPlace => (kernels.reduce)(a, b, b_mut, n),
                Operation::Four | Operation::Exact => {
                    let mut piece = [0u64; PIECE / 8];
                    let (piece, step) = (piece.as_mut_ptr().cast::<u8>(), PIECE / size);
                    for at in (0..n).step_by(step) {
                        let part = step.min(n - at);
                        let [a, b, c, d] = four.map(|operand| operand.add(at * size));
                        match exact {
                            Some(exact) => exact.sum(&[a, b, c, d], piece, part),
                            None => {
                                (kernels.reduce)(a, b, piece, part);
                                (kernels.reduce)(piece, c, piece, part);
                                (kernels.reduce)(piece, d, piece, part);
                            }
                        }
                        piece.copy_to_nonoverlapping(out.add(at * size), part * size);
                    }
                }
            }
        }
    }
}

/// Zeros stay zeros in every operation of every type: no subnormals, and the same work.
struct Buffers {
    a: Vec<u64>,
    b: Vec<u64>,
    out: Vec<u64>,
    copy: Vec<u64>,
    more: [Vec<u64>; 2],
}

/// GB/s at which `f` makes `bytes` of output.
fn speed(bytes: usize, mut f: impl FnMut()) -> f64 {
    let start = Instant::now();
    f();
    let calls = (REPETITION.as_nanos() / start.elapsed().as_nanos().max(1)).clamp(1, 1 << 20) as usize;
    let mut seconds: Vec<f64> = (0..REPETITIONS)
        .map(|_| {
            let start = Instant::now();
            (0..calls).for_each(|_| f());
            start.elapsed().as_secs_f64() / calls as f64
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    bytes as f64 / seconds[REPETITIONS / 2] / 1e9
}

fn row(dtype: &str, level: &str, speeds: [f64; SIZES.len()]) {
    println!("{dtype:<8}{level:<10}{:>10.1}{:>10.1}{:>10.1}", speeds[0], speeds[1], speeds[2]);
}

fn main() -> ExitCode {
    let (mut operation, mut dtypes) = (Operation::Reduce(ReduceOp::Sum), Vec::new());
    // Cargo passes `--bench`.
    for arg in std::env::args().skip(1).filter(|arg| !arg.starts_with("--")) {
        match (Operation::parse(&arg), arg.parse::<DType>()) {
            (Some(chosen), _) => operation = chosen,
            (None, Ok(dtype)) => dtypes.push(dtype),
            (None, Err(e)) => {
                eprintln!("error: no operation, and {e}");
                return ExitCode::from(2);
            }
        }
    }
    if dtypes.is_empty() {
        dtypes.extend(DType::ALL);
    }

    // Ones, not zeros from the operating system: those would all be one physical page. The odd 64 KiB keep the buffers
    // from being a power of two apart, where some processors' way predictors take two of them for one.
    let words = (SIZES[SIZES.len() - 1] + (64 << 10)) / size_of::<u64>();
    let mut buffers = Buffers {
        a: vec![1; words],
        b: vec![1; words],
        out: vec![1; words],
        copy: vec![1; words],
        more: [vec![1; words], vec![1; words]],
    };
    for buffer in
        [&mut buffers.a, &mut buffers.b, &mut buffers.out, &mut buffers.copy].into_iter().chain(&mut buffers.more)
    {
        buffer.fill(black_box(0));
    }

    println!("{:<8}{:<10}{:>10}{:>10}{:>10}   GB/s of output", "dtype", "level", "64 KiB", "1 MiB", "32 MiB");
    row(
        "memcpy",
        "",
        SIZES.map(|bytes| {
            let words = bytes / size_of::<u64>();
            speed(bytes, || black_box(&mut buffers.out)[..words].copy_from_slice(&buffers.a[..words]))
        }),
    );
    for dtype in dtypes {
        for level in Level::ALL {
            let Some(kernels) = reduce::kernels_at(level, dtype, operation.op()) else { continue };
            let exact =
                matches!(operation, Operation::Exact).then(|| Exact::new(dtype, Some(ReduceOp::Sum), 4)).flatten();
            if matches!(operation, Operation::Exact) && (exact.is_none() || level != Level::detect()) {
                continue;
            }
            row(
                dtype.name(),
                level.name(),
                SIZES.map(|bytes| {
                    speed(bytes, || {
                        operation.run(
                            &kernels,
                            exact.as_ref(),
                            black_box(&mut buffers),
                            (bytes / dtype.size(), dtype.size()),
                        )
                    })
                }),
            );
        }
    }
    ExitCode::SUCCESS
}
