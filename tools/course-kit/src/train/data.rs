//! Three interleaved spirals in the plane: easy to draw, impossible for a linear model.

use super::rng::Rng;

/// Number of classes, one per arm.
pub const CLASSES: usize = 3;

/// Points and their classes.
#[derive(Debug, Clone, PartialEq)]
pub struct Dataset {
    /// Two coordinates per point.
    pub points: Vec<f32>,
    /// The arm each point belongs to.
    pub labels: Vec<u8>,
}

impl Dataset {
    /// `per_class` points on each arm: radius grows from 0 to 1 over two thirds of a turn, with noise in the angle.
    pub fn spiral(per_class: usize, seed: u64) -> Dataset {
        let mut rng = Rng::new(seed);
        let mut data = Dataset { points: Vec::new(), labels: Vec::new() };
        for class in 0..CLASSES {
            for i in 0..per_class {
                let radius = (i as f32 + 0.5) / per_class as f32;
                let turn = class as f32 / CLASSES as f32 + 0.66 * radius;
                let angle = std::f32::consts::TAU * turn + 0.15 * rng.normal();
                data.points.extend([radius * angle.cos(), radius * angle.sin()]);
                data.labels.push(class as u8);
            }
        }
        data
    }

    /// Number of points.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// True without points.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// The points with the given indices, in that order.
    pub fn select(&self, indices: &[usize]) -> Dataset {
        Dataset {
            points: indices.iter().flat_map(|&i| [self.points[2 * i], self.points[2 * i + 1]]).collect(),
            labels: indices.iter().map(|&i| self.labels[i]).collect(),
        }
    }
}

/// The order of the samples in an epoch: the same on all ranks, because it depends on nothing else.
pub fn epoch_order(samples: usize, seed: u64, epoch: usize) -> Vec<usize> {
    Rng::new(seed ^ (epoch as u64 + 1).wrapping_mul(0xd134_2543_de82_ef95)).permutation(samples)
}

/// The shard of `rank` in `items`: `ranks` shards cover all items, as equally as possible.
pub fn shard<T>(items: &[T], rank: usize, ranks: usize) -> &[T] {
    &items[rank * items.len() / ranks..(rank + 1) * items.len() / ranks]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_cover_everything_once() {
        let items: Vec<usize> = (0..10).collect();
        for ranks in 1..12 {
            let all: Vec<usize> = (0..ranks).flat_map(|r| shard(&items, r, ranks).to_vec()).collect();
            assert_eq!(all, items, "{ranks} ranks");
        }
        assert_eq!(shard(&items, 1, 2), [5, 6, 7, 8, 9]);
    }

    #[test]
    fn the_data_are_balanced_and_repeatable() {
        let data = Dataset::spiral(50, 1);
        assert_eq!(data, Dataset::spiral(50, 1));
        assert_ne!(data, Dataset::spiral(50, 2));
        assert_eq!((data.len(), data.points.len()), (150, 300));
        assert_eq!(data.labels.iter().filter(|l| **l == 1).count(), 50);
    }

    #[test]
    fn epochs_have_different_orders() {
        assert_ne!(epoch_order(20, 1, 0), epoch_order(20, 1, 1));
        assert_eq!(epoch_order(20, 1, 1), epoch_order(20, 1, 1));
    }
}
