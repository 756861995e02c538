//! Residual connections, and dropout where a branch or the embedding enters the residual stream.

use super::parallel::Threads;
use super::profile::{Class, time};
use super::simd::simd_fn;
use crate::dropout::{Dropout, Mask, Site};

simd_fn! {
    /// `out[i] = mask[first + i] * x[i]`.
    pub fn apply(out: &mut [f32], x: &[f32], mask: Mask, first: u32) {
        for (i, (o, &v)) in out.iter_mut().zip(x).enumerate() {
            *o = v * mask.factor(first.wrapping_add(i as u32));
        }
    }
}

simd_fn! {
    /// `x[i] *= mask[first + i]`.
    pub fn apply_in_place(x: &mut [f32], mask: Mask, first: u32) {
        for (i, v) in x.iter_mut().enumerate() {
            *v *= mask.factor(first.wrapping_add(i as u32));
        }
    }
}

simd_fn! {
    fn add_masked(out: &mut [f32], x: &[f32], mask: Mask) {
        for (i, (o, &v)) in out.iter_mut().zip(x).enumerate() {
            *o = v + *o * mask.factor(i as u32);
        }
    }
}

simd_fn! {
    fn add(out: &mut [f32], x: &[f32]) {
        for (o, &v) in out.iter_mut().zip(x) {
            *o += v;
        }
    }
}

/// The masks of one site, and how many of its values belong to one sample.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// All masks of the step.
    pub dropout: &'a Dropout,
    /// Site of the masks.
    pub site: Site,
    /// Values per sample.
    pub sample: usize,
}

/// Residual connection: `branch = x + dropout(branch)`.
pub fn residual(branch: &mut [f32], x: &[f32], place: Place<'_>, threads: Threads) {
    let Place { dropout, site, sample } = place;
    let work = |number: usize, branch: &mut [f32]| {
        let x = &x[number * sample..][..sample];
        if dropout.is_on() { add_masked(branch, x, dropout.mask(site, number)) } else { add(branch, x) }
    };
    time(Class::Residual, 1, || threads.each(branch, sample, work));
}

/// `x = dropout(x)`.
pub fn dropout_in_place(x: &mut [f32], place: Place<'_>, threads: Threads) {
    if place.dropout.is_on() {
        let work = |number, x: &mut [f32]| apply_in_place(x, place.dropout.mask(place.site, number), 0);
        time(Class::Embedding, 1, || threads.each(x, place.sample, work));
    }
}

/// The gradient `d` through a dropout: `d` itself when there is none, else `space`, filled.
pub fn backward<'a>(space: &'a mut [f32], d: &'a [f32], place: Place<'_>, threads: Threads) -> &'a [f32] {
    let Place { dropout, site, sample } = place;
    if !dropout.is_on() {
        return d;
    }
    let work = |number, out: &mut [f32]| apply(out, &d[number * sample..][..sample], dropout.mask(site, number), 0);
    time(Class::Residual, 1, || threads.each(space, sample, work));
    space
}
