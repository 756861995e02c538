//! Builds and checks the book under `docs/book`. `scripts/book.sh` calls it; mdBook calls it as a preprocessor.

mod browser;
mod click;
mod code;
mod diagram;
mod directive;
mod expected;
mod fence;
mod finish;
mod html;
mod links;
mod look;
mod outputs;
mod paths;
mod preprocess;
mod programs;
mod rewrite;
#[cfg(test)]
mod sentences;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::{Parser, Subcommand};

/// Builds and checks the book.
#[derive(Debug, Parser)]
#[command(version)]
struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Called by mdBook: reads the book as JSON from standard input and writes it expanded to standard output.
    Preprocess {
        /// mdBook's query: `supports RENDERER`.
        #[arg(num_args = 0..)]
        question: Vec<String>,
    },
    /// Writes the targets of links that mdBook does not generate: source files as pages, animations, pictures.
    Finish {
        /// The built book.
        book: PathBuf,
    },
    /// Checks every link and anchor of the built book.
    Links {
        /// The built book.
        book: PathBuf,
    },
    /// Runs the commands under `docs/book/outputs` and compares their output with the book.
    Outputs {
        /// Write the outputs instead of comparing.
        #[arg(long)]
        bless: bool,
        /// Only these outputs; default: all.
        names: Vec<String>,
    },
    /// Opens every page in a headless Chromium, wide and narrow: screenshots, overflow, errors in the console.
    Look {
        /// The built book.
        book: PathBuf,
        /// Folder for the screenshots.
        #[arg(long, default_value = "target/book-shots")]
        shots: PathBuf,
        /// Take no screenshots.
        #[arg(long)]
        quiet: bool,
        /// Only pages whose path contains this.
        #[arg(long, default_value = "")]
        only: String,
        /// Use the book's dark theme.
        #[arg(long)]
        dark: bool,
    },
    /// Clicks through pages that `tinynccl-cli schedule --format html` made: buttons, keys, bytes, console, overflow.
    Click {
        /// The pages.
        #[arg(required = true)]
        pages: Vec<PathBuf>,
        /// Folder for the screenshots.
        #[arg(long)]
        pictures: PathBuf,
    },
}

fn main() -> ExitCode {
    program_kit::exit_code(run().map(|()| 0), |_| false)
}

fn run() -> Result<()> {
    match Options::parse().command {
        Command::Preprocess { question } => preprocess::run(&question),
        Command::Finish { book } => finish::run(&book),
        Command::Links { book } => links::run(&book),
        Command::Outputs { bless, names } => outputs::run(bless, &names),
        Command::Look { book, shots, quiet, only, dark } => {
            look::run(&book, (!quiet).then_some(shots.as_path()), &only, dark)
        }
        Command::Click { pages, pictures } => click::run(&pages, &pictures),
    }
}

/// Prints all that is wrong; an error, which `counted` words, where there is something.
fn none_wrong(wrong: &[String], counted: impl FnOnce(usize) -> String) -> Result<()> {
    for wrong in wrong {
        eprintln!("book: {wrong}");
    }
    ensure!(wrong.is_empty(), counted(wrong.len()));
    Ok(())
}
