//! temporary
use std::time::Instant;
use tinynccl::{Comm, ReduceOp};
fn main() {
    if !tinynccl::launch::is_rank() {
        let n: usize = std::env::args().nth(1).unwrap().parse().unwrap();
        std::process::exit(tinynccl::launch::Launcher::new(n).run_self().unwrap());
    }
    let comm = Comm::from_env().unwrap();
    let pin = rustix::thread::CpuSet::new();
    let mut pin = pin;
    pin.set(comm.rank() % 2);
    rustix::thread::sched_setaffinity(None, &pin).unwrap();
    let kind = std::env::args().nth(2).unwrap();
    let sym = kind == "sym";
    let max: usize = std::env::args().nth(3).map_or(128 << 20, |s| s.parse().unwrap());
    let (mut a, mut b, mut va, mut vb);
    let (x, y): (&mut [f32], &mut [f32]) = if sym {
        a = comm.alloc::<f32>(max / 4).unwrap();
        b = comm.alloc::<f32>(max / 4).unwrap();
        (&mut a, &mut b)
    } else {
        va = vec![1.0f32; max / 4];
        vb = vec![1.0f32; max / 4];
        (&mut va, &mut vb)
    };
    x.fill(1.0);
    y.fill(1.0);
    let mut bytes = 8;
    let mut line = String::new();
    while bytes <= max {
        let n = bytes / 4;
        let mut times = vec![];
        let mut iters = 1;
        for rep in 0..9 {
            let mut t = vec![0.0f64; 1];
            comm.barrier().unwrap();
            let start = Instant::now();
            for _ in 0..iters {
                comm.all_reduce(&x[..n], &mut y[..n], ReduceOp::Sum).unwrap();
            }
            t[0] = start.elapsed().as_secs_f64() / iters as f64;
            comm.all_reduce_in_place(&mut t, ReduceOp::Max).unwrap();
            if rep == 0 || rep == 1 {
                iters = ((0.01 / t[0]) as usize).clamp(1, 100000);
                let mut i = [iters as u64];
                comm.broadcast(&mut i, 0).unwrap();
                iters = i[0] as usize;
            } else {
                times.push(t[0]);
            }
        }
        times.sort_by(f64::total_cmp);
        line += &format!("{}: {:.2} ({:.2}); ", bytes, times[times.len() / 2] * 1e6, times[0] * 1e6);
        bytes *= 4;
    }
    if comm.rank() == 0 {
        println!("{kind} {line}");
    }
}
