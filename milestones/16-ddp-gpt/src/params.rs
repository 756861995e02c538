//! The parameters: their names, shapes and order, and their values in one flat vector.

use std::ops::Range;

use crate::config::ModelConfig;
use crate::rng::{self, Stream};

/// Name, shape and place of one tensor. Matrices are [outputs, inputs], as in PyTorch.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamInfo {
    /// nanoGPT's name.
    pub name: String,
    /// Rows and columns; one number for a vector.
    pub shape: Vec<usize>,
    /// First value in the flat vector.
    pub offset: usize,
    /// Number of values.
    pub len: usize,
    /// Deviation of the initial values, which are normal; LayerNorm weights have none and begin with 1.
    deviation: Option<f64>,
}

impl ParamInfo {
    /// Range of the tensor's values in a flat vector.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len
    }

    /// Returns true if AdamW decays the tensor: matrices and embeddings, not LayerNorm weights.
    pub fn decays(&self) -> bool {
        self.shape.len() >= 2
    }
}

/// Index of the token embedding, which is the output layer too.
pub const WTE: usize = 0;
/// Index of the position embedding.
pub const WPE: usize = 1;
/// Tensors per block.
const PER_LAYER: usize = 6;

/// Indices of a block's tensors: first LayerNorm; queries, keys and values from one product; attention's output
/// projection; second LayerNorm; the MLP's first and second matrix.
pub fn of_block(layer: usize) -> [usize; PER_LAYER] {
    std::array::from_fn(|i| 2 + layer * PER_LAYER + i)
}

/// Index of the last LayerNorm, where another block would begin.
pub fn final_ln(config: &ModelConfig) -> usize {
    of_block(config.layers)[0]
}

/// All tensors of a model, in order.
pub fn layout(config: &ModelConfig) -> Vec<ParamInfo> {
    let c = config.channels;
    // What feeds the residual stream begins smaller, by the number of its terms (GPT-2).
    let (normal, residual) = (Some(0.02), Some(0.02 / (2.0 * config.layers as f64).sqrt()));
    let mut list: Vec<ParamInfo> = Vec::new();
    let mut push = |name: String, shape: &[usize], deviation: Option<f64>| {
        let offset = count(&list);
        list.push(ParamInfo { name, shape: shape.to_vec(), offset, len: shape.iter().product(), deviation });
    };
    push("wte.weight".to_owned(), &[config.vocab, c], normal);
    push("wpe.weight".to_owned(), &[config.context, c], normal);
    for l in 0..config.layers {
        push(format!("h.{l}.ln_1.weight"), &[c], None);
        push(format!("h.{l}.attn.c_attn.weight"), &[3 * c, c], normal);
        push(format!("h.{l}.attn.c_proj.weight"), &[c, c], residual);
        push(format!("h.{l}.ln_2.weight"), &[c], None);
        push(format!("h.{l}.mlp.c_fc.weight"), &[4 * c, c], normal);
        push(format!("h.{l}.mlp.c_proj.weight"), &[c, 4 * c], residual);
    }
    push("ln_f.weight".to_owned(), &[c], None);
    list
}

/// Number of values in a layout.
pub fn count(layout: &[ParamInfo]) -> usize {
    layout.last().map_or(0, |p| p.offset + p.len)
}

/// Initial values: a function of the seed.
fn initialise(layout: &[ParamInfo], seed: u64) -> Vec<f32> {
    let mut values = vec![0.0; count(layout)];
    for (i, info) in layout.iter().enumerate() {
        let Some(deviation) = info.deviation else {
            values[info.range()].fill(1.0);
            continue;
        };
        let key = rng::key(seed, Stream::Init, &[i as u64]);
        for (j, pair) in values[info.range()].chunks_mut(2).enumerate() {
            let j = 2 * j as u64;
            let (a, b) = rng::normal_pair(rng::mix64(key.wrapping_add(j)), rng::mix64(key.wrapping_add(j + 1)));
            for (value, normal) in pair.iter_mut().zip([a, b]) {
                *value = (normal * deviation) as f32;
            }
        }
    }
    values
}

/// Shape, values and layout of the parameters.
#[derive(Debug, Clone)]
pub struct Model {
    /// Shape.
    pub config: ModelConfig,
    /// Names and places of the tensors.
    pub layout: Vec<ParamInfo>,
    /// All values.
    pub values: Vec<f32>,
}

impl Model {
    /// A model with initial values.
    pub fn new(config: ModelConfig, seed: u64) -> Self {
        let layout = layout(&config);
        let values = initialise(&layout, seed);
        Model { config, layout, values }
    }

    /// Values of tensor `i`.
    pub fn param(&self, i: usize) -> &[f32] {
        &self.values[self.layout[i].range()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Preset;

    #[test]
    fn the_full_preset_has_10_7_million_parameters() {
        assert_eq!(count(&layout(&Preset::Full.model(65))), 10_745_088);
    }

    #[test]
    fn indices_name_the_right_tensors() {
        let config = Preset::Tiny.model(30);
        let list = layout(&config);
        assert_eq!(list[WPE].name, "wpe.weight");
        assert_eq!(list[of_block(1)[5]].name, "h.1.mlp.c_proj.weight");
        assert_eq!(list[of_block(1)[1]].shape, [48, 16]);
        assert_eq!(list[final_ln(&config)].name, "ln_f.weight");
        assert_eq!(list.len(), final_ln(&config) + 1);
    }
}
