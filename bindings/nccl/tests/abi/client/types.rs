//! NCCL's element types and operators, by number, with elements as bytes.

use half::{bf16, f16};
use tinynccl::{F8E4M3, F8E5M2};

/// An element type.
#[derive(Clone, Copy)]
pub(super) struct Type {
    pub(super) code: i32,
    pub(super) name: &'static str,
    of: fn(i64) -> Vec<u8>,
}

impl Type {
    pub(super) fn size(&self) -> usize {
        (self.of)(0).len()
    }

    /// Elements as bytes. The numbers are such as every type holds exactly.
    pub(super) fn bytes(&self, values: impl IntoIterator<Item = i64>) -> Vec<u8> {
        values.into_iter().flat_map(self.of).collect()
    }
}

pub(super) const I32: Type = Type { code: 2, name: "i32", of: |v| (v as i32).to_le_bytes().to_vec() };
pub(super) const F32: Type = Type { code: 7, name: "f32", of: |v| (v as f32).to_le_bytes().to_vec() };

pub(super) const TYPES: [Type; 12] = [
    Type { code: 0, name: "i8", of: |v| (v as i8).to_le_bytes().to_vec() },
    Type { code: 1, name: "u8", of: |v| (v as u8).to_le_bytes().to_vec() },
    I32,
    Type { code: 3, name: "u32", of: |v| (v as u32).to_le_bytes().to_vec() },
    Type { code: 4, name: "i64", of: |v| v.to_le_bytes().to_vec() },
    Type { code: 5, name: "u64", of: |v| (v as u64).to_le_bytes().to_vec() },
    Type { code: 6, name: "f16", of: |v| f16::from_f32(v as f32).to_le_bytes().to_vec() },
    F32,
    Type { code: 8, name: "f64", of: |v| (v as f64).to_le_bytes().to_vec() },
    Type { code: 9, name: "bf16", of: |v| bf16::from_f32(v as f32).to_le_bytes().to_vec() },
    Type { code: 10, name: "f8e4m3", of: |v| vec![F8E4M3::from_f32(v as f32).to_bits()] },
    Type { code: 11, name: "f8e5m2", of: |v| vec![F8E5M2::from_f32(v as f32).to_bits()] },
];

pub(super) const SUM: i32 = 0;
pub(super) const OPERATORS: [i32; 5] = [SUM, 1, 2, 3, AVG];
pub(super) const AVG: i32 = 4;

/// Returns the result of an operator on numbers.
pub(super) fn reduced(op: i32, values: impl ExactSizeIterator<Item = i64>) -> i64 {
    let n = values.len() as i64;
    match op {
        SUM => values.sum(),
        1 => values.product(),
        2 => values.max().unwrap(),
        3 => values.min().unwrap(),
        AVG => values.sum::<i64>() / n,
        _ => panic!("no operator {op}"),
    }
}

/// Element `i` of rank `rank`'s input: such that every type holds what every operator makes of it, for 2 and 4 ranks.
pub(super) fn value(op: i32, ranks: usize, rank: usize, i: usize) -> i64 {
    let bit = ((i * 7 + rank * 3 + i / 5 + (i * rank) / 3) % 2) as i64;
    // A mean is whole.
    if op == AVG { ranks as i64 * bit } else { 1 + bit }
}
