//! Work split by rows over the threads of one rank.

use gemm_common::Parallelism;

/// Threads of this rank, and how to split rows over them. With one thread nothing but plain calls happen.
#[derive(Debug, Clone, Copy)]
pub struct Threads(usize);

impl Threads {
    /// A rank of `n` threads (at least one).
    pub fn new(n: usize) -> Self {
        Threads(n.max(1))
    }

    /// Number of threads.
    pub fn count(self) -> usize {
        self.0
    }

    /// Setting of `gemm` for this number of threads.
    pub fn gemm(self) -> Parallelism {
        if self.0 == 1 { Parallelism::None } else { Parallelism::Rayon(self.0) }
    }

    /// Makes the calling thread one of the `n` threads of the process-wide pool; call it once, in `main`.
    pub fn install(self) -> Result<(), rayon::ThreadPoolBuildError> {
        if self.0 == 1 {
            return Ok(());
        }
        rayon::ThreadPoolBuilder::new().num_threads(self.0).use_current_thread().build_global()
    }

    /// Calls `work(first_row, part)` once per thread, each with its share of `rows` rows of `parts`.
    pub fn rows<P: Parts>(self, rows: usize, parts: P, work: impl Fn(usize, P) + Sync) {
        split(self.0, rows, 0, parts, &work);
    }

    /// Calls `work(number, row)` for each row of `width` values of `out`.
    pub fn each(self, out: &mut [f32], width: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
        self.rows(out.len() / width, Rows(out, width), |first, Rows(out, _)| {
            out.chunks_mut(width).enumerate().for_each(|(i, row)| work(first + i, row));
        });
    }
}

fn split<P: Parts>(pieces: usize, rows: usize, first: usize, parts: P, work: &(impl Fn(usize, P) + Sync)) {
    if pieces <= 1 {
        if rows > 0 {
            work(first, parts);
        }
        return;
    }
    let left_pieces = pieces / 2;
    let left_rows = rows * left_pieces / pieces;
    let (left, right) = parts.split(left_rows, left_pieces);
    rayon::join(
        || split(left_pieces, left_rows, first, left, work),
        || split(pieces - left_pieces, rows - left_rows, first + left_rows, right, work),
    );
}

/// Mutable data that can be cut in two: after a number of rows, or after a number of pieces (one piece per thread).
pub trait Parts: Send + Sized {
    /// The part before the cut and the part after it.
    fn split(self, rows: usize, pieces: usize) -> (Self, Self);
}

/// Rows of `width` values each.
pub struct Rows<'a>(pub &'a mut [f32], pub usize);

impl Parts for Rows<'_> {
    fn split(self, rows: usize, _pieces: usize) -> (Self, Self) {
        let (a, b) = self.0.split_at_mut(rows * self.1);
        (Rows(a, self.1), Rows(b, self.1))
    }
}

/// Scratch of `width` values per thread.
pub struct PerThread<'a>(pub &'a mut [f32], pub usize);

impl Parts for PerThread<'_> {
    fn split(self, _rows: usize, pieces: usize) -> (Self, Self) {
        let (a, b) = self.0.split_at_mut(pieces * self.1);
        (PerThread(a, self.1), PerThread(b, self.1))
    }
}

impl<A: Parts, B: Parts> Parts for (A, B) {
    fn split(self, rows: usize, pieces: usize) -> (Self, Self) {
        let (a0, a1) = self.0.split(rows, pieces);
        let (b0, b1) = self.1.split(rows, pieces);
        ((a0, b0), (a1, b1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_visited_once() {
        for threads in 1..6 {
            for rows in 0..9 {
                let mut data = vec![0.0; rows * 3];
                let mut count = vec![0.0; threads];
                let parts = (Rows(&mut data, 3), PerThread(&mut count, 1));
                Threads::new(threads).rows(rows, parts, |first, (Rows(out, width), PerThread(count, _))| {
                    for (i, row) in out.chunks_mut(width).enumerate() {
                        row.fill((first + i + 1) as f32);
                        count[0] += 1.0;
                    }
                });
                let want: Vec<f32> = (0..rows * 3).map(|i| (i / 3 + 1) as f32).collect();
                assert_eq!(data, want, "{threads} threads, {rows} rows");
                assert_eq!(count.iter().sum::<f32>(), rows as f32);
            }
        }
    }
}
