//! The contract and the helpers that policies are built with: the files of `wit/`, which this binary carries.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use super::Language;
use crate::guest_tools::{self, CONTRACT, Wit};

/// What the Go module of the helpers is called.
pub(super) const GO_MODULE: &str = "github.com/forkpoint/forkpoint/wit/go";

macro_rules! files {
    ($($path:literal),* $(,)?) => {
        &[$(($path, include_str!(concat!("../../../../../wit/", $path)))),*]
    };
}

const RUST: &[(&str, &str)] = files![
    "rust/Cargo.toml",
    "rust/src/error.rs",
    "rust/src/hash.rs",
    "rust/src/host.rs",
    "rust/src/lib.rs",
    "rust/src/outcome.rs",
    "rust/src/plan.rs",
    "rust/src/question.rs",
    "rust/src/request.rs",
    "rust/src/session.rs",
    "rust/macros/Cargo.toml",
    "rust/macros/src/lib.rs",
];
const C: &[(&str, &str)] = files!["c/forkpoint.h"];
const CPP: &[(&str, &str)] = files!["cpp/forkpoint.hpp"];
const JS: &[(&str, &str)] = files!["js/policy.js"];
const TS: &[(&str, &str)] = files!["js/policy.js", "js/policy.d.ts"];
const PYTHON: &[(&str, &str)] = files!["python/forkpoint_policy.py"];
const GO: &[(&str, &str)] = files![
    "go/go.mod",
    "go/forkpoint.go",
    "go/types/types.go",
    "go/runtime/runtime.go",
    "go/bindings/export_wit_world/route.go",
];
const ASSEMBLYSCRIPT: &[(&str, &str)] = files!["assemblyscript/forkpoint.ts"];
const ZIG: &[(&str, &str)] = files!["zig/forkpoint.zig"];
const WAT: &[(&str, &str)] = files!["wat/forkpoint.wat"];

/// The helpers of a language, by their paths in `wit/`.
pub(super) const fn helpers(language: Language) -> &'static [(&'static str, &'static str)] {
    match language {
        Language::Rust => RUST,
        Language::C => C,
        Language::Cpp => CPP,
        Language::Js => JS,
        Language::Ts => TS,
        Language::Python => PYTHON,
        Language::Go => GO,
        Language::AssemblyScript => ASSEMBLYSCRIPT,
        Language::Zig => ZIG,
        Language::Wat => WAT,
    }
}

/// A folder with the contract and the helpers.
pub(in crate::cli::policy) struct Kit(PathBuf);

impl Kit {
    /// The one that was asked for, the policy's own, or the one built in, which goes into `scratch`. A contract that
    /// comes without helpers gets those built in, which are made for [`CONTRACT`].
    pub(super) fn find(named: Option<Wit<'_>>, dir: &Path, scratch: &Path) -> Result<Self> {
        let contract = match named {
            Some(Wit::Path(named)) => {
                let named =
                    named.canonicalize().with_context(|| format!("cannot read {}", named.display()))?;
                let Ok(contract) = std::fs::read_to_string(named.join("policy.wit")) else {
                    bail!("{} has no policy.wit", named.display());
                };
                if Language::value_variants()
                    .iter()
                    .any(|language| named.join(helpers(*language)[0].0).is_file())
                {
                    return Ok(Self(named));
                }
                contract
            }
            Some(Wit::Text(contract)) => contract.to_owned(),
            None if dir.join("wit/policy.wit").is_file() => return Ok(Self(dir.join("wit"))),
            None => CONTRACT.to_owned(),
        };
        let built_in = scratch.join("wit");
        for language in [
            Language::C,
            Language::Cpp,
            Language::Ts,
            Language::Python,
            Language::Go,
            Language::AssemblyScript,
            Language::Zig,
            Language::Wat,
        ] {
            write(language, &built_in)?;
        }
        write_file(&built_in.join("policy.wit"), &contract)?;
        Ok(Self(built_in))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

/// Lays the contract and a language's helpers into `out`.
pub(in crate::cli::policy) fn write(language: Language, out: &Path) -> Result<()> {
    write_file(&out.join("policy.wit"), CONTRACT)?;
    for (path, text) in helpers(language) {
        write_file(&out.join(path), text)?;
    }
    Ok(())
}

/// Writes a file and the folders above it.
pub(in crate::cli::policy) fn write_file(path: &Path, text: &str) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(path, text))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Completes the Go module at `module`, whose helpers import the generated bindings of the contract.
pub(in crate::cli::policy) fn bind_go(wit: &Path, module: &Path) -> Result<()> {
    guest_tools::bindgen_go(Wit::Path(wit), module, GO_MODULE)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every file below `dir` that is a helper, by its path in `wit/`.
    fn walk(root: &Path, dir: &Path, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let skipped = ["target", "Cargo.lock", "README.md", "policy.wit", "__pycache__"];
            if path.file_name().and_then(|name| name.to_str()).is_some_and(|name| skipped.contains(&name)) {
                continue;
            }
            if path.is_dir() {
                walk(root, &path, found);
            } else {
                found.push(path.strip_prefix(root).unwrap().to_str().unwrap().to_owned());
            }
        }
    }

    #[test]
    fn every_helper_of_the_repository_is_built_in() {
        let wit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../wit");
        let mut found = Vec::new();
        walk(&wit, &wit, &mut found);
        let built_in: Vec<&str> =
            Language::value_variants().iter().flat_map(|l| helpers(*l)).map(|(path, _)| *path).collect();
        for path in found {
            assert!(built_in.contains(&path.as_str()), "{path} is not built in");
        }
    }

    #[test]
    fn the_policy_s_own_kit_goes_before_the_one_built_in() {
        let dir = tempfile::tempdir().unwrap();
        let scratch = tempfile::tempdir().unwrap();
        let built_in = Kit::find(None, dir.path(), scratch.path()).unwrap();
        assert!(
            built_in.path().starts_with(scratch.path()) && built_in.path().join("c/forkpoint.h").is_file()
        );
        write(Language::C, &dir.path().join("wit")).unwrap();
        assert_eq!(Kit::find(None, dir.path(), scratch.path()).unwrap().path(), dir.path().join("wit"));
        assert!(!dir.path().join("wit/zig").exists());
        let error =
            Kit::find(Some(Wit::Path(scratch.path())), dir.path(), scratch.path()).err().unwrap().to_string();
        assert!(error.contains("has no policy.wit"), "{error}");
    }

    #[test]
    fn a_contract_without_helpers_gets_those_built_in() {
        let (dir, scratch) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write(Language::C, &dir.path().join("wit")).unwrap();
        let trial = Path::new(env!("CARGO_MANIFEST_DIR")).join("../wit/trial");
        for named in [Wit::Path(&trial), Wit::of("0.2.0-trial").unwrap()] {
            let kit = Kit::find(Some(named), dir.path(), scratch.path()).unwrap();
            let contract = std::fs::read_to_string(kit.path().join("policy.wit")).unwrap();
            assert!(contract.contains("package forkpoint:policy@0.2.0-trial;"));
            assert!(kit.path().join("c/forkpoint.h").is_file());
        }
    }
}
