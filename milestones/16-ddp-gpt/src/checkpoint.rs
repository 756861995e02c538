//! Checkpoints: everything that the rest of a run depends on, in one file that is either whole or absent.
//!
//! ```text
//! "tinyGPT\n"   8 bytes
//! version       u32, little-endian, as all numbers here
//! length        u32: bytes of the header
//! header        JSON: shape, settings, steps done, vocabulary, history of losses
//! parameters    f32 × values
//! AdamW mean    f32 × values  ┐ of the one optimizer, or,
//! AdamW square  f32 × values  ┘ with local steps, of each rank's in turn
//! momentum      f32 × values: with local steps, of the outer optimizer
//! CRC-32        u32, of all bytes before it
//! ```
//!
//! The state of the random numbers needs no more than the seed and the step (see [`crate::rng`]).

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::config::{ModelConfig, Preset, TrainConfig};
use crate::cpu::adamw::AdamW;
use crate::data::Tokenizer;
use crate::params;

const MAGIC: &[u8; 8] = b"tinyGPT\n";
const VERSION: u32 = 1;
const FIXED: usize = 16;

/// Losses at one step, counted from 0, before that step's update.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Step.
    pub step: usize,
    /// Loss on the step's batch; absent after the last step.
    pub train: Option<f64>,
    /// Loss on the validation part, where it was evaluated.
    pub validation: Option<f64>,
}

/// Metadata of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// Preset that the run started from.
    pub preset: Preset,
    /// Shape.
    pub model: ModelConfig,
    /// Settings.
    pub train: TrainConfig,
    /// Steps done.
    pub step: usize,
    /// All characters of the vocabulary, in order.
    pub vocabulary: String,
    /// Number of parameters.
    pub values: usize,
    /// Number of AdamW states: with local steps every rank has its own.
    #[serde(default = "one")]
    pub optimizers: usize,
    /// Losses so far.
    pub history: Vec<Point>,
}

fn one() -> usize {
    1
}

/// A checkpoint in memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Checkpoint {
    /// Metadata: settings, steps done, losses.
    pub header: Header,
    /// Parameters.
    pub values: Vec<f32>,
    /// Optimizer states, by rank, or the one of all ranks.
    pub adamw: Vec<AdamW>,
    /// Momentum of the outer optimizer; `None` without local steps.
    pub momentum: Option<Vec<f32>>,
    /// The file's checksum; ranks compare it.
    pub crc: u32,
}

/// Writes a checkpoint: to a temporary file beside `path`, flushed to the disk, then renamed over it. A failure at any
/// moment leaves the earlier file as it was. `arrays`: what follows the header, in the order of the file.
pub fn save(path: &Path, header: &Header, arrays: &[&Vec<f32>]) -> Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut name = path.file_name().context("the checkpoint's path names no file")?.to_owned();
    name.push(".tmp-");
    clear(folder, &name);
    name.push(std::process::id().to_string());
    let temporary: PathBuf = folder.join(name);
    let written = write(&temporary, header, arrays)
        .and_then(|()| fs::rename(&temporary, path))
        .and_then(|()| File::open(folder)?.sync_all());
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written.with_context(|| format!("cannot write the checkpoint {}", path.display()))
}

/// Removes what runs left behind that were killed while they wrote: files whose names begin with `name`, and that no
/// process has locked.
fn clear(folder: &Path, name: &OsStr) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let ours = entry.file_name().as_encoded_bytes().starts_with(name.as_encoded_bytes());
        if ours && File::open(entry.path()).is_ok_and(|file| file.try_lock().is_ok()) {
            // Another rank or run may have removed it.
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn write(path: &Path, header: &Header, arrays: &[&Vec<f32>]) -> std::io::Result<()> {
    let json = serde_json::to_vec(header)?;
    let length = u32::try_from(json.len()).map_err(std::io::Error::other)?;
    let mut file = File::create(path)?;
    // Ends with this process, however that ends. Where a file system has no locks no one takes the file for left
    // behind.
    let _ = file.lock();
    let mut bytes = [&MAGIC[..], &VERSION.to_le_bytes(), &length.to_le_bytes(), &json].concat();
    bytes.reserve_exact(4 * arrays.iter().map(|array| array.len()).sum::<usize>() + 4);
    bytes.extend(arrays.iter().copied().flatten().flat_map(|v| v.to_le_bytes()));
    bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
    file.write_all(&bytes)?;
    file.sync_all()
}

/// Reads a checkpoint and checks all of it.
pub fn load(path: &Path) -> Result<Checkpoint> {
    let bytes = fs::read(path).with_context(|| format!("cannot read the checkpoint {}", path.display()))?;
    parse(&bytes).with_context(|| format!("{} is no checkpoint to resume from", path.display()))
}

/// [`load`] from bytes.
pub fn parse(bytes: &[u8]) -> Result<Checkpoint> {
    let Some((fixed, rest)) = bytes.split_at_checked(FIXED) else {
        bail!("cut off: expected at least {FIXED} bytes, got {}", bytes.len());
    };
    if !fixed.starts_with(MAGIC) {
        let got = String::from_utf8_lossy(&fixed[..MAGIC.len()]).into_owned();
        bail!("wrong magic: expected {:?}, got {got:?}", String::from_utf8_lossy(MAGIC));
    }
    let version = number(&fixed[8..12]);
    if version != VERSION {
        bail!("version: expected {VERSION}, got {version}");
    }
    let length = number(&fixed[12..16]) as usize;
    let Some((json, rest)) = rest.split_at_checked(length) else {
        bail!("cut off: expected a header of {length} bytes, got {}", rest.len());
    };
    let header: Header = serde_json::from_slice(json).context("damaged header")?;
    if header.optimizers == 0 {
        bail!("damaged header: no optimizer");
    }
    let outer = usize::from(header.train.outer.is_some());
    let arrays = header.optimizers.checked_mul(2).and_then(|n| n.checked_add(1 + outer));
    let expected = arrays.and_then(|n| n.checked_mul(4)?.checked_mul(header.values)).and_then(|n| n.checked_add(4));
    if expected != Some(rest.len()) {
        let expected = expected.map_or("an impossible number of".to_owned(), |n| n.to_string());
        bail!("cut off or damaged: expected {expected} bytes after the header, got {}", rest.len());
    }
    let (body, stored) = bytes.split_at(bytes.len() - 4);
    let (stored, computed) = (number(stored), crc32fast::hash(body));
    if stored != computed {
        bail!("damaged: expected checksum {stored:08x}, got {computed:08x}");
    }
    let (data, n) = (&rest[..rest.len() - 4], 4 * header.values);
    let array = |i: usize| floats(&data[i * n..(i + 1) * n]);
    Ok(Checkpoint {
        values: array(0),
        adamw: (0..header.optimizers)
            .map(|i| AdamW { mean: array(1 + 2 * i), square: array(2 + 2 * i), updates: header.step })
            .collect(),
        momentum: (outer == 1).then(|| array(1 + 2 * header.optimizers)),
        header,
        crc: computed,
    })
}

fn number(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |n, &b| n << 8 | u32::from(b))
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_bits(number(b))).collect()
}

impl Header {
    /// Fails unless the file fits the model and the text that the run asks for.
    pub fn check(&self, model: &ModelConfig, tokenizer: &Tokenizer) -> Result<()> {
        let (expected, got) = (tokenizer.vocabulary(), &self.vocabulary);
        if expected != *got {
            let strange: String = got.chars().filter(|&c| tokenizer.encode(c).is_none()).take(10).collect();
            let [expected, got] = [&expected, got].map(|vocabulary| vocabulary.chars().count());
            bail!(
                "another vocabulary: expected the text's {expected} characters, got {got} (not in the text: {strange:?})"
            );
        }
        if self.model != *model {
            bail!("another shape: expected {model}; got {}", self.model);
        }
        if self.values != params::count(&params::layout(model)) {
            bail!("shape ({model}) does not have the {} parameters that the file holds", self.values);
        }
        if self.step > self.train.steps {
            bail!("{} steps done of {}", self.step, self.train.steps);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn example() -> (Header, Vec<f32>, AdamW) {
        let model = Preset::Tiny.model(3);
        let values = params::Model::new(model, 1).values;
        let n = values.len();
        let adamw = AdamW { mean: vec![0.5; n], square: vec![0.25; n], updates: 7 };
        let history = vec![Point { step: 0, train: Some(1.0986123), validation: None }];
        let train = Preset::Tiny.train();
        let vocabulary = "abé".to_owned();
        let header =
            Header { preset: Preset::Tiny, model, train, step: 7, vocabulary, values: n, optimizers: 1, history };
        (header, values, adamw)
    }

    fn example_bytes() -> Vec<u8> {
        let (header, values, adamw) = example();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c");
        save(&path, &header, &[&values, &adamw.mean, &adamw.square]).unwrap();
        fs::read(path).unwrap()
    }

    #[test]
    fn what_killed_runs_left_behind_goes_and_what_is_being_written_stays() {
        let (header, values, adamw) = example();
        let folder = tempfile::tempdir().unwrap();
        let beside = |name: &str| folder.path().join(name);
        for name in ["c.tmp-1", "c.tmp-2", "other.tmp-1"] {
            fs::write(beside(name), "half of it").unwrap();
        }
        let writing = File::open(beside("c.tmp-2")).unwrap();
        writing.lock().unwrap();
        save(&beside("c"), &header, &[&values, &adamw.mean, &adamw.square]).unwrap();
        let left = |name: &str| beside(name).exists();
        assert_eq!(["c", "c.tmp-1", "c.tmp-2", "other.tmp-1"].map(left), [true, false, true, true]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    #[test]
    fn comes_back_as_it_was_and_leaves_no_temporary_file() {
        let (header, values, adamw) = example();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c");
        fs::write(&path, "older").unwrap();
        save(&path, &header, &[&values, &adamw.mean, &adamw.square]).unwrap();
        let back = load(&path).unwrap();
        assert_eq!((back.header, back.values, back.adamw, back.momentum), (header, values, vec![adamw], None));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_failed_write_names_the_path() {
        let (header, values, adamw) = example();
        let e = save(Path::new("/nonexistent/folder/c"), &header, &[&values, &adamw.mean, &adamw.square]).unwrap_err();
        assert!(format!("{e:#}").contains("/nonexistent/folder/c"), "{e:#}");
    }

    #[test]
    fn mismatches_name_expected_and_got() {
        let (header, ..) = example();
        let tokenizer = Tokenizer::of("abé");
        header.check(&header.model, &tokenizer).unwrap();
        let e = header.check(&Preset::Small.model(3), &tokenizer).unwrap_err().to_string();
        assert!(e.contains("expected 4 layers") && e.contains("got 2 layers"), "{e}");
        let e = header.check(&header.model, &Tokenizer::of("abcd")).unwrap_err().to_string();
        assert!(e.contains("4 characters, got 3") && e.contains("\"é\""), "{e}");
        let mut bytes = example_bytes();
        bytes[8] = 9;
        assert!(parse(&bytes).unwrap_err().to_string().contains("expected 1, got 9"));
        assert!(parse(b"PK\x03\x04 a zip archive").unwrap_err().to_string().contains("magic"));
    }

    proptest! {
        #[test]
        fn cut_off_files_are_refused(share in 0.0..1.0f64) {
            let bytes = example_bytes();
            let cut = (bytes.len() as f64 * share) as usize;
            let e = parse(&bytes[..cut]).unwrap_err().to_string();
            prop_assert!(e.contains("expected"), "{}", e);
        }

        #[test]
        fn a_flipped_bit_is_noticed(share in 0.0..1.0f64, bit in 0..8u32) {
            let mut bytes = example_bytes();
            let at = (bytes.len() as f64 * share) as usize;
            bytes[at] ^= 1 << bit;
            prop_assert!(parse(&bytes).is_err());
        }

        #[test]
        fn any_bytes_are_survived(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), magic: bool) {
            if magic {
                bytes.splice(0..0, MAGIC.iter().copied().chain(VERSION.to_le_bytes()));
            }
            prop_assert!(parse(&bytes).is_err());
        }
    }
}
