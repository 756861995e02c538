//! Text to batches: a tokenizer with one token per character, a train/validation split, and batches that are a pure
//! function of (seed, step), of which each rank takes its part.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::rng::{self, Stream};

/// Most distinct characters that a text may have.
const MAX_VOCAB: usize = 4096;

/// The characters of a text in order of their code points; a token is a place in that order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tokenizer {
    chars: Vec<char>,
}

impl Tokenizer {
    /// Characters that occur in `text`.
    pub fn of(text: &str) -> Self {
        let set: std::collections::BTreeSet<char> = text.chars().collect();
        Tokenizer { chars: set.into_iter().collect() }
    }

    /// Number of tokens.
    pub fn size(&self) -> usize {
        self.chars.len()
    }

    /// All characters, in order.
    pub fn vocabulary(&self) -> String {
        self.chars.iter().collect()
    }

    /// The token of a character.
    pub fn encode(&self, c: char) -> Option<u32> {
        self.chars.binary_search(&c).ok().map(|i| i as u32)
    }

    /// The character of a token.
    pub fn decode(&self, token: u32) -> Option<char> {
        self.chars.get(token as usize).copied()
    }
}

/// A text, tokenized and split: the first nine tenths to train on, the last tenth to validate.
#[derive(Debug)]
pub struct Corpus {
    /// Origin of the text, for messages.
    pub source: String,
    /// Its characters.
    pub tokenizer: Tokenizer,
    /// CRC-32 of the text: ranks compare it.
    pub crc: u32,
    tokens: Vec<u32>,
    split: usize,
}

/// Part of the corpus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// The part that is trained on.
    Train,
    /// The part that is only evaluated.
    Validation,
}

impl Corpus {
    /// Tokenizes `text`; `source` names it in messages.
    pub fn new(source: impl Into<String>, text: &str) -> Result<Self> {
        let source = source.into();
        let tokenizer = Tokenizer::of(text);
        if tokenizer.size() > MAX_VOCAB {
            bail!("{source}: {} distinct characters, expected at most {MAX_VOCAB}", tokenizer.size());
        }
        let tokens: Vec<u32> = text.chars().filter_map(|c| tokenizer.encode(c)).collect();
        let split = tokens.len() - tokens.len() / 10;
        Ok(Corpus { source, tokenizer, crc: crc32fast::hash(text.as_bytes()), tokens, split })
    }

    /// The text: the file asked for, or the usual one, or the fallback, which a note then says.
    pub fn find(asked: Option<&Path>, notes: &mut Vec<String>) -> Result<Corpus> {
        let usual = default_paths();
        if let Some(path) = asked.or_else(|| usual.iter().map(PathBuf::as_path).find(|path| path.exists())) {
            return Corpus::read(path);
        }
        let corpus = fallback()?;
        let (source, size) = (&corpus.source, corpus.size());
        notes.push(format!(
            "warning: no data/tinyshakespeare.txt here: training on {source} instead ({size} characters); \
             scripts/get-data.sh fetches the usual text, --data FILE takes any"
        ));
        Ok(corpus)
    }

    /// Reads a file of UTF-8 text.
    fn read(path: &Path) -> Result<Self> {
        let name = path.display();
        let bytes = std::fs::read(path).with_context(|| format!("cannot read the text {name}"))?;
        let text = match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(e) => {
                let at = e.utf8_error().valid_up_to();
                bail!("{name}: not UTF-8: byte {at} is {:#04x}", e.as_bytes().get(at).copied().unwrap_or(0));
            }
        };
        Self::new(name.to_string(), &text)
    }

    /// Fails unless both parts hold at least one sequence of `context` characters and the one that follows it.
    pub fn check_length(&self, context: usize) -> Result<()> {
        let shortest = self.part(Split::Train).len().min(self.part(Split::Validation).len());
        if shortest <= context {
            let (source, size, needed) = (&self.source, self.size(), (context + 1) * 10);
            bail!("{source}: text too short: {size} characters; a context of {context} needs at least {needed}");
        }
        Ok(())
    }

    /// Characters in the whole text.
    pub fn size(&self) -> usize {
        self.tokens.len()
    }

    /// Tokens of a part.
    pub fn part(&self, split: Split) -> &[u32] {
        match split {
            Split::Train => &self.tokens[..self.split],
            Split::Validation => &self.tokens[self.split..],
        }
    }
}

/// A rank's sequences of one batch: inputs, and the same one character later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Number, within the global batch, of the first sequence here.
    pub first: usize,
    context: usize,
    /// [sequences, context].
    pub inputs: Vec<u32>,
    /// [sequences, context].
    pub targets: Vec<u32>,
}

impl Batch {
    /// Rank `rank`'s room in global batches of `global` sequences; `global` must be a multiple of `ranks`.
    pub fn new(global: usize, context: usize, rank: usize, ranks: usize) -> Result<Self> {
        if global == 0 || !global.is_multiple_of(ranks) {
            bail!("a global batch of {global} sequences cannot be split evenly over {ranks} ranks: choose a multiple");
        }
        let own = global / ranks;
        let room = vec![0; own * context];
        Ok(Batch { first: rank * own, context, inputs: room.clone(), targets: room })
    }

    /// Sequences held here.
    pub fn samples(&self) -> usize {
        self.inputs.len() / self.context
    }

    /// Fills in this rank's part of batch number `step`. `corpus` must have passed `check_length`.
    pub fn fill(&mut self, corpus: &Corpus, split: Split, seed: u64, step: usize) {
        let tokens = corpus.part(split);
        let stream = if split == Split::Train { Stream::Batch } else { Stream::Eval };
        let t = self.context;
        for (i, (x, y)) in self.inputs.chunks_mut(t).zip(self.targets.chunks_mut(t)).enumerate() {
            let key = rng::key(seed, stream, &[step as u64, (self.first + i) as u64]);
            let start = rng::below(key, tokens.len() - t);
            x.copy_from_slice(&tokens[start..start + t]);
            y.copy_from_slice(&tokens[start + 1..start + t + 1]);
        }
    }
}

/// Paths of the usual text: `data/tinyshakespeare.txt` here or at the root of the workspace.
fn default_paths() -> [PathBuf; 2] {
    let file = Path::new("data").join("tinyshakespeare.txt");
    [file.clone(), Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(file)]
}

/// A corpus with no file and no network: the milestones' READMEs where they are at hand, in the same order on every
/// rank, and the specification, which is compiled in.
fn fallback() -> Result<Corpus> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../milestones");
    let folders = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = folders.map(|entry| entry.path().join("README.md")).collect();
    files.sort();
    let mut text: String = files.iter().filter_map(|file| std::fs::read_to_string(file).ok()).collect();
    text.push_str(include_str!("../../../SPEC.md"));
    Corpus::new("the project's own documentation", &text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn corpus() -> Corpus {
        let text: String = (0..2000u32).map(|i| char::from(b'a' + (i * i % 23) as u8)).collect();
        Corpus::new("test", &text).unwrap()
    }

    #[test]
    fn tokens_are_characters_in_order() {
        let t = Tokenizer::of("hello é");
        assert_eq!(t.vocabulary(), " ehloé");
        assert_eq!(t.encode('é'), Some(5));
        assert_eq!(t.decode(5), Some('é'));
        assert_eq!((t.encode('x'), t.decode(6)), (None, None));
    }

    #[test]
    fn ranks_take_parts_of_the_same_global_batch() {
        let corpus = corpus();
        let mut whole = Batch::new(12, 8, 0, 1).unwrap();
        whole.fill(&corpus, Split::Train, 9, 4);
        for ranks in [2, 3, 4, 6] {
            let (mut inputs, mut targets) = (Vec::new(), Vec::new());
            for rank in 0..ranks {
                let mut part = Batch::new(12, 8, rank, ranks).unwrap();
                part.fill(&corpus, Split::Train, 9, 4);
                inputs.extend(part.inputs);
                targets.extend(part.targets);
            }
            assert_eq!((&inputs, &targets), (&whole.inputs, &whole.targets));
        }
        let mut next = whole.clone();
        next.fill(&corpus, Split::Train, 9, 5);
        assert_ne!(next, whole);
        assert!(Batch::new(12, 8, 0, 5).unwrap_err().to_string().contains("multiple"));
    }

    #[test]
    fn targets_are_inputs_one_later_and_the_shortest_text_works() {
        let text: String = "abcdefghij".chars().cycle().take(90).collect();
        let corpus = Corpus::new("t", &text).unwrap();
        corpus.check_length(8).unwrap();
        assert!(corpus.check_length(9).unwrap_err().to_string().contains("at least 100"));
        let mut b = Batch::new(5, 8, 0, 1).unwrap();
        b.fill(&corpus, Split::Validation, 1, 0);
        for (x, y) in b.inputs.chunks(8).zip(b.targets.chunks(8)) {
            assert_eq!(x[1..], y[..7]);
        }
    }

    #[test]
    fn the_fallback_is_long_enough_for_every_preset() {
        fallback().unwrap().check_length(256).unwrap();
    }
}
