//! `forkpoint policy`.

mod bench;
mod build;
mod check;
mod explain;
mod new;
mod replay;
mod sign;
mod stale;
mod test;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Args, Subcommand};

use self::bench::BenchArgs;
use self::build::BuildArgs;
use self::check::CheckArgs;
use self::explain::ExplainArgs;
use self::new::NewArgs;
use self::replay::ReplayArgs;
use self::sign::{KeygenArgs, SignArgs};
use self::test::TestArgs;
use super::files::{read_file, write_file};
use super::on_runtime;
use crate::guest_tools::{self, CONTRACT, Wit};
use crate::policy::CONTRACT_VERSIONS;

#[derive(Debug, Subcommand)]
pub(super) enum PolicyCommand {
    /// Start a policy: a folder with the smallest useful one of a language.
    New(NewArgs),
    /// Make a component of a policy's source.
    Build(BuildArgs),
    /// Say whether a component would be served, what it asks for and what a call costs.
    #[command(after_help = "\
Examples:
  forkpoint policy check plugins/shell-gate.wasm
  forkpoint policy check my-gate.wasm --request request.json --json
  forkpoint policy check my-gate.wasm --signer uf1Rf3A+3dqUkVFkYGN2TTBlIqPyO7nEjXQ0ZnAYRlE=")]
    Check(CheckArgs),
    /// Run test cases, with no model unless one is named.
    #[command(after_help = "\
Examples:
  forkpoint policy test my-gate                                  my-gate/my-gate.wasm on my-gate/tests
  forkpoint policy test                                          the policy in this folder
  forkpoint policy test examples/auto/tests --policy plugins/auto.wasm
  forkpoint policy test my-gate --junit report.xml
  forkpoint policy test my-gate --live --model smollm2-135m      a real model answers

docs/testing-policies.md has the format of a case.")]
    Test(TestArgs),
    /// Run a policy over a journal, with no model, and show which plans would change.
    #[command(after_help = "\
Examples:
  forkpoint policy replay ~/.local/state/forkpoint/*/journal --policy new.wasm --name shell-gate
  forkpoint policy replay journal.jsonl --policy plugins/shell-gate.wasm --set deny-at=0.7
  forkpoint policy replay journal.jsonl --label corrections.jsonl --into plugins/shell-gate.probes/shell.jsonl")]
    Replay(ReplayArgs),
    /// Send one request through a policy and show each step, with probabilities.
    #[command(after_help = "\
Examples:
  forkpoint policy explain shell-gate \"remove every file under /var/lib\"
  forkpoint policy explain ./my-gate.wasm --request request.json")]
    Explain(ExplainArgs),
    /// Measure compilation, loading and calls, beside wasmtime alone.
    #[command(after_help = "Example:\n  forkpoint policy bench plugins/*.wasm")]
    Bench(BenchArgs),
    /// Make a key to sign policies with.
    #[command(after_help = "\
Example:
  forkpoint policy keygen alice.pem       prints the line of [plugins.signers] for the operator's forkpoint.toml")]
    Keygen(KeygenArgs),
    /// Sign a component, under its name and with its manifest.
    #[command(after_help = "\
Examples:
  forkpoint policy sign my-gate.wasm --key alice.pem
  openssl genpkey -algorithm ed25519 -out alice.pem       another way to a key")]
    Sign(SignArgs),
    /// Make a component of a core module, such as clang and TinyGo build.
    #[command(after_help = "\
Examples:
  forkpoint policy componentize gate.core.wasm plugins/gate.wasm
  forkpoint policy componentize gate.core.wasm plugins/gate.wasm --adapt    built for wasm32-wasip1
  forkpoint policy componentize - - < in.wasm > out.wasm")]
    Componentize {
        /// The core module; - reads standard input.
        input: PathBuf,
        /// Where the component goes; - writes standard output.
        output: PathBuf,
        /// Link the adapter from WASI preview 1.
        #[arg(long)]
        adapt: bool,
        #[command(flatten)]
        contract: ContractArgs,
    },
    /// Write bindings of the contract for a language.
    #[command(subcommand)]
    Bindgen(BindgenCommand),
}

#[derive(Debug, Subcommand)]
pub(super) enum BindgenCommand {
    /// For C: policy.h, policy.c and an object to link.
    #[command(after_help = "\
Examples:
  forkpoint policy bindgen c build/bindings
  forkpoint policy bindgen c --contract 0.2.0-trial build/bindings
  forkpoint policy bindgen c --wit wit build/bindings")]
    C {
        #[command(flatten)]
        contract: ContractArgs,
        /// The folder to write into.
        out_dir: PathBuf,
    },
}

/// Which contract.
#[derive(Debug, Args)]
pub(super) struct ContractArgs {
    /// The contract, from a folder or a file. A module that carries its own keeps that.
    #[arg(long, value_name = "DIR")]
    wit: Option<PathBuf>,
    /// The contract of this version, which is built in [default: 0.1.0].
    #[arg(long, value_name = "VERSION", conflicts_with = "wit", value_parser = CONTRACT_VERSIONS)]
    contract: Option<String>,
}

impl ContractArgs {
    fn wit(&self) -> Wit<'_> {
        let named = self.contract.as_deref().and_then(Wit::of);
        self.wit.as_deref().map(Wit::Path).or(named).unwrap_or(Wit::Text(CONTRACT))
    }
}

impl PolicyCommand {
    pub(super) fn run(self) -> Result<()> {
        match self {
            Self::New(args) => args.run(),
            Self::Build(args) => args.run(),
            Self::Check(args) => on_runtime(args.run()),
            Self::Test(args) => on_runtime(args.run()),
            Self::Replay(args) => on_runtime(args.run()),
            Self::Explain(args) => on_runtime(args.run()),
            Self::Bench(args) => on_runtime(args.run()),
            Self::Keygen(args) => args.run(),
            Self::Sign(args) => args.run(),
            Self::Componentize { input, output, adapt, contract } => {
                let core = read_file(&input)?;
                let component = guest_tools::componentize(&core, adapt, contract.wit())
                    .with_context(|| format!("cannot make a component of {}", input.display()))?;
                write_file(&output, &component)
            }
            Self::Bindgen(BindgenCommand::C { contract, out_dir }) => {
                let written = guest_tools::bindgen_c(contract.wit(), &out_dir)?;
                for path in written {
                    eprintln!("wrote {}", path.display());
                }
                Ok(())
            }
        }
    }
}

/// `key=value`, as `--set` takes it.
fn pair(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').ok_or_else(|| format!("expected key=value, got {text:?}"))?;
    Ok((pair.0.trim().to_owned(), pair.1.to_owned()))
}

fn table(pairs: &[(String, String)]) -> BTreeMap<String, String> {
    pairs.iter().cloned().collect()
}

/// A path as a shell takes it for one word.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-+,:@%=".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text;
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Where compiled code is kept, the server's own place.
fn code_cache() -> Option<PathBuf> {
    Some(crate::folders::cache_folder().join("policies"))
}

fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("cannot write to standard output")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_one_word_of_a_shell() {
        for (path, word) in [
            ("plugins/my-gate.wasm", "plugins/my-gate.wasm"),
            ("my gates/é", "'my gates/é'"),
            ("it's", r"'it'\''s'"),
            ("~/gate", "'~/gate'"),
            ("$HOME", "'$HOME'"),
        ] {
            assert_eq!(quoted(Path::new(path)), word);
        }
    }
}
