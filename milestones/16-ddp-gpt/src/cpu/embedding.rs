//! Token plus position embedding. `tokens` holds B sequences of `context` tokens.

use super::parallel::Threads;
use super::profile::{Class, time};

/// `out[b, t] = wte[token] + wpe[t]`; rows of `channels` values.
pub fn forward(out: &mut [f32], tokens: &[u32], [wte, wpe]: [&[f32]; 2], context: usize, threads: Threads) {
    let c = out.len() / tokens.len();
    let work = |row: usize, out: &mut [f32]| {
        let token = &wte[tokens[row] as usize * c..][..c];
        let position = &wpe[row % context * c..][..c];
        for ((o, &a), &b) in out.iter_mut().zip(token).zip(position) {
            *o = a + b;
        }
    };
    time(Class::Embedding, 1, || threads.each(out, c, work));
}

/// `dwte[token] += d[b, t]` for each token.
pub fn backward_tokens(dwte: &mut [f32], d: &[f32], tokens: &[u32]) {
    let c = d.len() / tokens.len();
    time(Class::Embedding, 1, || {
        for (row, &token) in d.chunks(c).zip(tokens) {
            add(&mut dwte[token as usize * c..][..c], row);
        }
    });
}

/// `dwpe[t] =` the sum of d[b, t] over b, `sample` values each; positions that no sample has get 0.
pub fn backward_positions(dwpe: &mut [f32], d: &[f32], sample: usize) {
    time(Class::Embedding, 1, || {
        dwpe.fill(0.0);
        d.chunks(sample).for_each(|sample| add(dwpe, sample));
    });
}

fn add(out: &mut [f32], x: &[f32]) {
    for (o, &v) in out.iter_mut().zip(x) {
        *o += v;
    }
}
