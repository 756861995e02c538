//! Dropout whose masks are computed, not stored: the same counters give the same mask in the backward pass and on any
//! rank.

use crate::rng::{self, Stream};

/// Position in the network at which a mask applies.
#[derive(Debug, Clone, Copy)]
pub enum Site {
    /// After the embeddings.
    Embedding,
    /// On attention probabilities of a layer.
    Attention(usize),
    /// After the attention projection of a layer.
    AttentionOut(usize),
    /// After the MLP of a layer.
    MlpOut(usize),
}

impl Site {
    /// All sites of a network, in the order of their numbers.
    pub fn all(layers: usize) -> Vec<Site> {
        let of_layer = |l| [Site::Attention(l), Site::AttentionOut(l), Site::MlpOut(l)];
        std::iter::once(Site::Embedding).chain((0..layers).flat_map(of_layer)).collect()
    }

    /// Its number.
    pub fn id(self) -> u64 {
        match self {
            Site::Embedding => 0,
            Site::Attention(layer) => 1 + 3 * layer as u64,
            Site::AttentionOut(layer) => 2 + 3 * layer as u64,
            Site::MlpOut(layer) => 3 + 3 * layer as u64,
        }
    }
}

/// All masks of one step on one rank.
#[derive(Debug, Clone, Copy)]
pub struct Dropout {
    seed: u64,
    step: u64,
    first_sample: u64,
    /// An activation is dropped when its 24 random bits are below this; 0: no dropout.
    pub threshold: u32,
    /// Factor on what is kept.
    pub scale: f32,
}

impl Dropout {
    /// No dropout: evaluation and sampling.
    pub const OFF: Dropout = Dropout { seed: 0, step: 0, first_sample: 0, threshold: 0, scale: 1.0 };

    /// Masks of `step`; this rank's first sample is number `first_sample` of the global batch.
    pub fn new(probability: f64, seed: u64, step: usize, first_sample: usize) -> Self {
        let threshold = (probability * f64::from(1 << 24)) as u32;
        let scale = (1.0 / (1.0 - f64::from(threshold) / f64::from(1 << 24))) as f32;
        Dropout { seed, step: step as u64, first_sample: first_sample as u64, threshold, scale }
    }

    /// Returns true if anything is dropped.
    pub fn is_on(&self) -> bool {
        self.threshold > 0
    }

    /// The mask of one site for the rank's sample number `sample`.
    pub fn mask(&self, site: Site, sample: usize) -> Mask {
        let sample = self.first_sample + sample as u64;
        let key = rng::key(self.seed, Stream::Dropout, &[self.step, site.id(), sample]);
        Mask { key, dropout: *self }
    }
}

/// A mask over the activations of one sample at one site.
#[derive(Debug, Clone, Copy)]
pub struct Mask {
    /// Key from which the mask's values are computed.
    pub key: u64,
    dropout: Dropout,
}

impl Mask {
    /// Returns true if the mask drops anything.
    pub fn is_on(&self) -> bool {
        self.dropout.is_on()
    }

    /// 0 for a dropped activation, 1 / (1 - p) for a kept one.
    #[inline(always)]
    pub fn factor(&self, index: u32) -> f32 {
        if (rng::bits32(self.key, index) >> 8) < self.dropout.threshold { 0.0 } else { self.dropout.scale }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_listed_by_number() {
        let ids: Vec<u64> = Site::all(3).into_iter().map(Site::id).collect();
        assert_eq!(ids, (0..10).collect::<Vec<_>>());
    }

    #[test]
    fn keeps_the_mean_and_drops_the_asked_share() {
        let d = Dropout::new(0.2, 5, 3, 0);
        let n = 200_000;
        let mut out = vec![0.0; n];
        let mask = d.mask(Site::Attention(1), 4);
        out.iter_mut().enumerate().for_each(|(i, v)| *v = mask.factor(i as u32));
        let dropped = out.iter().filter(|&&v| v == 0.0).count() as f64 / n as f64;
        let mean = out.iter().map(|&v| f64::from(v)).sum::<f64>() / n as f64;
        approx::assert_abs_diff_eq!(dropped, 0.2, epsilon = 0.005);
        approx::assert_abs_diff_eq!(mean, 1.0, epsilon = 0.01);
    }

    #[test]
    fn masks_follow_the_global_sample_not_the_rank() {
        let whole = Dropout::new(0.5, 5, 3, 0);
        let second_half = Dropout::new(0.5, 5, 3, 4);
        let bits = |m: Mask| (0..64).map(|i| m.factor(i) > 0.0).collect::<Vec<_>>();
        assert_eq!(bits(whole.mask(Site::Embedding, 6)), bits(second_half.mask(Site::Embedding, 2)));
        assert_ne!(bits(whole.mask(Site::Embedding, 6)), bits(whole.mask(Site::Embedding, 2)));
        assert_ne!(bits(whole.mask(Site::MlpOut(0), 6)), bits(whole.mask(Site::MlpOut(1), 6)));
        let next = Dropout::new(0.5, 5, 4, 0);
        assert_ne!(bits(whole.mask(Site::Embedding, 6)), bits(next.mask(Site::Embedding, 6)));
    }
}
