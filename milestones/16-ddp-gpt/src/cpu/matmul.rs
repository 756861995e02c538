//! Matrix products over the `gemm` crate: bounds are checked here, once per product, and nowhere else.

use super::parallel::Threads;
use super::profile::{Class, products};

/// A read-only matrix inside a slice: element (r, c) is `data[r * row_stride + c * col_stride]`.
#[derive(Debug, Clone, Copy)]
pub struct Mat<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Mat<'a> {
    /// A row-major matrix whose rows are `stride` values apart.
    pub fn strided(data: &'a [f32], rows: usize, cols: usize, stride: usize) -> Self {
        check(data.len(), rows, cols, stride);
        Mat { data, rows, cols, row_stride: stride, col_stride: 1 }
    }

    /// A dense row-major matrix.
    pub fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// The transpose; nothing moves.
    pub fn t(self) -> Self {
        Mat { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }
}

/// A writable row-major matrix inside a slice.
pub struct MatMut<'a> {
    data: &'a mut [f32],
    rows: usize,
    cols: usize,
    stride: usize,
}

impl<'a> MatMut<'a> {
    /// A row-major matrix whose rows are `stride` values apart.
    pub fn strided(data: &'a mut [f32], rows: usize, cols: usize, stride: usize) -> Self {
        check(data.len(), rows, cols, stride);
        MatMut { data, rows, cols, stride }
    }

    /// A dense row-major matrix.
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }
}

fn check(len: usize, rows: usize, cols: usize, stride: usize) {
    assert!(rows > 0 && cols > 0 && stride >= cols, "matrix {rows}x{cols}, stride {stride}");
    assert!((rows - 1) * stride + cols <= len, "matrix {rows}x{cols}, stride {stride} in a slice of {len}");
}

/// `out = scale · a·b`, or `out += scale · a·b` with `add`. Returns the floating-point operations done.
pub fn matmul(out: MatMut<'_>, a: Mat<'_>, b: Mat<'_>, scale: f32, add: bool, threads: Threads) -> u64 {
    let (m, n, k) = (out.rows, out.cols, a.cols);
    assert!(a.rows == m && b.cols == n && b.rows == k, "({}x{}) = ({}x{k})·({}x{})", m, n, a.rows, b.rows, b.cols);
    // SAFETY: every matrix was checked against its slice when it was made, and the shapes fit each other; `out` is a
    // mutable borrow, so it overlaps neither input.
    unsafe {
        // Its kernels write columns, so it computes the transpose: outᵀ = bᵀ·aᵀ.
        gemm_f32::gemm::f32::get_gemm_fn()(
            n,
            m,
            k,
            out.data.as_mut_ptr(),
            out.stride as isize,
            1,
            add,
            b.data.as_ptr(),
            b.row_stride as isize,
            b.col_stride as isize,
            a.data.as_ptr(),
            a.row_stride as isize,
            a.col_stride as isize,
            1.0,
            scale,
            false,
            false,
            false,
            threads.gemm(),
        );
    }
    // A multiplication and an addition per term.
    2 * m as u64 * n as u64 * k as u64
}

/// `out[rows, O] = x[rows, I] · weight[O, I]ᵀ`.
pub fn linear(out: &mut [f32], x: &[f32], weight: &[f32], rows: usize, threads: Threads) {
    let (outputs, inputs) = (out.len() / rows, x.len() / rows);
    let weight = Mat::new(weight, outputs, inputs).t();
    let (out, x) = (MatMut::new(out, rows, outputs), Mat::new(x, rows, inputs));
    products(Class::Linear, 1, || matmul(out, x, weight, 1.0, false, threads));
}

/// `dx[rows, I] = dy[rows, O] · weight[O, I]`.
pub fn linear_input(dx: &mut [f32], dy: &[f32], weight: &[f32], rows: usize, threads: Threads) {
    let (outputs, inputs) = (dy.len() / rows, dx.len() / rows);
    let weight = Mat::new(weight, outputs, inputs);
    let (dx, dy) = (MatMut::new(dx, rows, inputs), Mat::new(dy, rows, outputs));
    products(Class::Linear, 1, || matmul(dx, dy, weight, 1.0, false, threads));
}

/// `dweight[O, I] = dy[rows, O]ᵀ · x[rows, I]`.
pub fn linear_weight(dweight: &mut [f32], dy: &[f32], x: &[f32], rows: usize, threads: Threads) {
    let (outputs, inputs) = (dy.len() / rows, x.len() / rows);
    let (dy, x) = (Mat::new(dy, rows, outputs).t(), Mat::new(x, rows, inputs));
    let dweight = MatMut::new(dweight, outputs, inputs);
    products(Class::Linear, 1, || matmul(dweight, dy, x, 1.0, false, threads));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(n: usize, seed: u64) -> Vec<f32> {
        (0..n as u64).map(|i| crate::rng::uniform(crate::rng::mix64(seed ^ (i << 8))) as f32 - 0.5).collect()
    }

    /// Every shape, layout and mode against three plain loops.
    #[test]
    fn agrees_with_the_definition() {
        for &(m, n, k) in &[(1, 1, 1), (3, 5, 7), (17, 33, 9), (64, 16, 130), (2, 65, 128)] {
            for mode in 0..16 {
                let (ta, tb, add, threads) = (mode & 1 != 0, mode & 2 != 0, mode & 4 != 0, 1 + (mode >> 3));
                let pad = 3;
                let (ar, ac) = if ta { (k, m) } else { (m, k) };
                let (br, bc) = if tb { (n, k) } else { (k, n) };
                let (a, b) = (fill(ar * (ac + pad), 1), fill(br * (bc + pad), 2));
                let mut out = fill(m * (n + pad), 3);
                let before = out.clone();
                let ma = Mat::strided(&a, ar, ac, ac + pad);
                let mb = Mat::strided(&b, br, bc, bc + pad);
                let (ma, mb) = (if ta { ma.t() } else { ma }, if tb { mb.t() } else { mb });
                matmul(MatMut::strided(&mut out, m, n, n + pad), ma, mb, 0.5, add, Threads::new(threads));
                for i in 0..m {
                    for j in 0..n + pad {
                        let at = i * (n + pad) + j;
                        if j >= n {
                            assert_eq!(out[at], before[at], "padding written");
                            continue;
                        }
                        let mut want = 0.0f64;
                        for p in 0..k {
                            let x = a[if ta { p * (ac + pad) + i } else { i * (ac + pad) + p }];
                            let y = b[if tb { j * (bc + pad) + p } else { p * (bc + pad) + j }];
                            want += 0.5 * f64::from(x) * f64::from(y);
                        }
                        want += if add { f64::from(before[at]) } else { 0.0 };
                        let close = approx::abs_diff_eq!(f64::from(out[at]), want, epsilon = 1e-5);
                        assert!(close, "{m}x{n}x{k} mode {mode} ({i},{j}): {} {want}", out[at]);
                    }
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "in a slice of 5")]
    fn a_matrix_must_fit_its_slice() {
        Mat::new(&[0.0; 5], 2, 3);
    }
}
