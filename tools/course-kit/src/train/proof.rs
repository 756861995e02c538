//! The proof that all ranks hold the same weights. Every rank hashes the bytes of each parameter, an all-gather
//! collects the hashes, and every rank compares all of them. It sends 8 bytes per parameter instead of the parameters.

use anyhow::{Context as _, Result, bail};
use tinynccl::Comm;
use tinynccl::ddp::ParamSpec;

/// FNV-1a with 64 bits: one changed bit changes the hash, because each step is invertible. Not cryptographic.
pub fn fingerprint(values: &[f32]) -> u64 {
    bytemuck::cast_slice::<f32, u8>(values)
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Compares all ranks' parameters. Returns the fingerprint of the whole model, or an error that names the first
/// parameter and the ranks that differ. A collective: every rank calls it, and all get the same answer.
pub fn prove_identical(comm: &Comm, specs: &[ParamSpec], params: &[&[f32]]) -> Result<u64> {
    compare(specs, &gather(comm, params)?, params.len())
}

/// The fingerprints of all parameters of all ranks, rank by rank. A collective.
pub fn gather(comm: &Comm, params: &[&[f32]]) -> Result<Vec<u64>> {
    let ours: Vec<u64> = params.iter().map(|p| fingerprint(p)).collect();
    let mut all = vec![0u64; ours.len() * comm.size()];
    comm.all_gather(&ours, &mut all).context("comparing the weights")?;
    Ok(all)
}

/// `all` holds `params` fingerprints per rank.
fn compare(specs: &[ParamSpec], all: &[u64], params: usize) -> Result<u64> {
    if params == 0 {
        return Ok(0);
    }
    let first = &all[..params];
    for (rank, theirs) in all.chunks_exact(params).enumerate() {
        let differ = theirs.iter().zip(first).filter(|(a, b)| a != b).count();
        if let Some(p) = theirs.iter().zip(first).position(|(a, b)| a != b) {
            let name = specs.get(p).map_or("?", |s| s.name.as_str());
            bail!(
                "the replicas have diverged: {name} is {:016x} on rank 0 and {:016x} on rank {rank} \
                 ({differ} of {params} parameters differ)",
                first[p],
                theirs[p]
            );
        }
    }
    Ok(first.iter().fold(0, |hash: u64, f| hash.rotate_left(7).wrapping_mul(31) ^ f))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn specs() -> Vec<ParamSpec> {
        ["a", "b"].map(|n| ParamSpec { name: n.into(), len: 1 }).to_vec()
    }

    #[test]
    fn one_bit_shows() {
        let a = [1.0f32, 2.0, 3.0];
        let mut b = a;
        b[1] = f32::from_bits(b[1].to_bits() ^ 1);
        assert_ne!(fingerprint(&a), fingerprint(&b));
        // Zeros of different sign are equal as numbers and different as bits; the proof compares bits.
        assert_ne!(fingerprint(&[0.0]), fingerprint(&[-0.0]));
        // The published FNV-1a offset basis, which is the hash of no input.
        assert_eq!(fingerprint(&[]), 0xcbf29ce484222325);
    }

    #[test]
    fn the_error_names_the_parameter_and_the_rank() {
        assert!(compare(&specs(), &[1, 2, 1, 2, 1, 2], 2).is_ok());
        let e = compare(&specs(), &[1, 2, 1, 2, 1, 9], 2).unwrap_err().to_string();
        assert!(e.contains("b is") && e.contains("rank 2") && e.contains("1 of 2"), "{e}");
    }
}
