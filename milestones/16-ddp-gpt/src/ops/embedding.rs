//! Token plus position embedding. `tokens` holds B sequences of `context` tokens.

use super::parallel::{Rows, Threads};

/// `out[b, t] = wte[token] + wpe[t]`.
pub fn forward(
    out: &mut [f32],
    tokens: &[u32],
    wte: &[f32],
    wpe: &[f32],
    channels: usize,
    context: usize,
    threads: Threads,
) {
    threads.rows(tokens.len(), Rows(out, channels), |first, Rows(out, c)| {
        for (i, out) in out.chunks_mut(c).enumerate() {
            let token = &wte[tokens[first + i] as usize * c..][..c];
            let position = &wpe[(first + i) % context * c..][..c];
            for ((o, &a), &b) in out.iter_mut().zip(token).zip(position) {
                *o = a + b;
            }
        }
    });
}

/// `dwte[token] += d[b, t]` for each token.
pub fn backward_tokens(dwte: &mut [f32], d: &[f32], tokens: &[u32], channels: usize) {
    for (row, &token) in d.chunks(channels).zip(tokens) {
        add(&mut dwte[token as usize * channels..][..channels], row);
    }
}

/// `dwpe[t] =` the sum of d[b, t] over b; positions past `context` get 0.
pub fn backward_positions(dwpe: &mut [f32], d: &[f32], channels: usize, context: usize) {
    dwpe.fill(0.0);
    for sample in d.chunks(context * channels) {
        add(dwpe, sample);
    }
}

fn add(out: &mut [f32], x: &[f32]) {
    for (o, &v) in out.iter_mut().zip(x) {
        *o += v;
    }
}
