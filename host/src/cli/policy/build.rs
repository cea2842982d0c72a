//! `forkpoint policy build`: a folder with a policy's source becomes a component.

pub(super) mod kit;
mod manifest;
mod recipes;
mod rust;
mod script;
pub(super) mod tool;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};

use self::kit::Kit;
use crate::cli::files::write_file;
use crate::guest_tools::Wit;
use crate::policy::{CONTRACT_VERSIONS, is_policy_name};

/// What `forkpoint policy build` takes.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  forkpoint policy build                                      the policy in this folder
  forkpoint policy build my-gate --out plugins/my-gate.wasm   with its manifest: a running server takes it up
  ZIG=~/zig-0.17.1/zig forkpoint policy build my-gate         with this compiler rather than the one on PATH
  forkpoint policy build my-gate -- -O3                       more flags for the compiler

The language is told by the folder's files: Cargo.toml, go.mod, asconfig.json, or policy.c, .cpp, .js, .ts, .py, .zig or
.wat. Compilers are looked for under CARGO, RUSTC, GO, ZIG, COMPONENTIZE_QJS, TSC, COMPONENTIZE_PY and ASC, then in the
folder's own node_modules and .venv, then on PATH.")]
pub(in crate::cli) struct BuildArgs {
    /// The policy's folder.
    #[arg(default_value = ".")]
    dir: PathBuf,
    /// Where the component goes [default: DIR/NAME.wasm, NAME being its manifest's name or the folder's]. In another
    /// folder it gets a copy of the manifest beside it, unless one is there.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Take the contract and the helpers from here, a folder like the repository's wit/ or with a contract alone
    /// [default: DIR/wit, or those built in].
    #[arg(long, value_name = "DIR")]
    wit: Option<PathBuf>,
    /// Take this version of the contract, which is built in.
    #[arg(long, value_name = "VERSION", conflicts_with = "wit", value_parser = CONTRACT_VERSIONS)]
    contract: Option<String>,
    /// Link the adapter from WASI, for C, C++ and Go, rather than stand-ins that give nothing. Policies are refused
    /// WASI, and the refusal names what was called.
    #[arg(long)]
    wasi: bool,
    /// More flags for the language's compiler.
    #[arg(last = true, value_name = "FLAG")]
    flags: Vec<OsString>,
}

/// What a policy is written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Language {
    #[value(alias = "rs")]
    Rust,
    C,
    #[value(aliases = ["c++", "cxx"])]
    Cpp,
    #[value(alias = "javascript")]
    Js,
    #[value(alias = "typescript")]
    Ts,
    #[value(alias = "py")]
    Python,
    #[value(alias = "golang")]
    Go,
    #[value(name = "assemblyscript", alias = "as")]
    AssemblyScript,
    Zig,
    #[value(aliases = ["wasm-text", "wast"])]
    Wat,
}

/// A policy to be built.
struct Job<'a> {
    /// The policy's folder.
    dir: &'a Path,
    /// The contract and the helpers.
    wit: &'a Path,
    /// For what lies between source and component; ends with the build.
    scratch: &'a Path,
    /// Whether WASI is asked of the host.
    wasi: bool,
    /// More flags for the compiler.
    flags: &'a [OsString],
}

impl BuildArgs {
    pub(in crate::cli) fn run(self) -> Result<()> {
        let dir = self.dir.canonicalize().with_context(|| format!("cannot read {}", self.dir.display()))?;
        let language = Language::of(&dir)?;
        let out = match self.out {
            Some(out) => out,
            None => dir.join(format!("{}.wasm", policy_name(&dir)?)),
        };
        let folder = folder_of(&out)?;
        let scratch = tempfile::Builder::new().prefix("forkpoint-build-").tempdir();
        let scratch = scratch.context("cannot make a folder for what is built")?;
        let named = self.wit.as_deref().map(Wit::Path);
        let named = named.or_else(|| self.contract.as_deref().and_then(Wit::of));
        let kit = Kit::find(named, &dir, scratch.path())?;
        let job =
            Job { dir: &dir, wit: kit.path(), scratch: scratch.path(), wasi: self.wasi, flags: &self.flags };
        let component = recipes::build(language, &job)?;
        let served = out.extension().is_some_and(|extension| extension == "wasm");
        if served
            && folder.is_some_and(|folder| folder != dir)
            && let Some(manifest) = manifest::find(&dir)?
            && let Some(said) = manifest::place(&manifest, &out)?
        {
            // Before the component, which a server takes up with what lies beside it.
            eprintln!("{said}");
        }
        write_file(&out, &component)?;
        eprintln!("wrote {} ({} KB)", out.display(), component.len().div_ceil(1000));
        Ok(())
    }
}

impl Language {
    /// The file that tells it.
    pub(super) const fn marker(self) -> &'static str {
        match self {
            Self::Rust => "Cargo.toml",
            Self::C => "policy.c",
            Self::Cpp => "policy.cpp",
            Self::Js => "policy.js",
            Self::Ts => "policy.ts",
            Self::Python => "policy.py",
            Self::Go => "go.mod",
            Self::AssemblyScript => "asconfig.json",
            Self::Zig => "policy.zig",
            Self::Wat => "policy.wat",
        }
    }

    /// Extensions of files beside the marker that are compiled with it.
    pub(super) const fn modules(self) -> &'static [&'static str] {
        match self {
            Self::C => &["c", "h"],
            Self::Cpp => &["cpp", "hpp", "h"],
            Self::Python => &["py"],
            Self::Go => &["go"],
            Self::Zig => &["zig"],
            Self::Rust | Self::Js | Self::Ts | Self::AssemblyScript | Self::Wat => &[],
        }
    }

    pub(super) fn of(dir: &Path) -> Result<Self> {
        let found: Vec<Self> =
            Self::value_variants().iter().copied().filter(|l| dir.join(l.marker()).is_file()).collect();
        let markers =
            |languages: &[Self]| languages.iter().map(|l| l.marker()).collect::<Vec<_>>().join(", ");
        match found[..] {
            [language] => Ok(language),
            [] => bail!(
                "{} holds no policy's source: expected one of {}",
                dir.display(),
                markers(Self::value_variants())
            ),
            _ => bail!("{} holds {}: expected one of them", dir.display(), markers(&found)),
        }
    }
}

/// The name of the only manifest, or of the folder.
fn policy_name(dir: &Path) -> Result<String> {
    let manifest = manifest::find(dir)?;
    let name = manifest.as_deref().map_or(dir.file_name(), Path::file_stem).unwrap_or_default();
    let name = name.to_string_lossy().into_owned();
    if !is_policy_name(&name) {
        bail!("{name:?} is not a policy's name (lower-case letters, digits, - and _): say --out FILE");
    }
    Ok(name)
}

/// The folder that a file goes into; none for standard output.
fn folder_of(out: &Path) -> Result<Option<PathBuf>> {
    let folder = match out.parent() {
        _ if out == Path::new("-") => return Ok(None),
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    if !folder.is_dir() {
        bail!("cannot write {}: {} is no folder, make it first", out.display(), folder.display());
    }
    folder.canonicalize().map(Some).with_context(|| format!("cannot read {}", folder.display()))
}

#[cfg(test)]
impl BuildArgs {
    /// The build of a folder into a file.
    pub(super) fn of(dir: &Path, out: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
            out: Some(out.to_owned()),
            wit: None,
            contract: None,
            wasi: false,
            flags: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::Builder::new()
            .prefix("gate-")
            .rand_bytes(0)
            .tempdir_in(tempfile::tempdir().unwrap().keep());
        let dir = dir.unwrap();
        for file in files {
            std::fs::write(dir.path().join(file), "").unwrap();
        }
        dir
    }

    #[test]
    fn a_language_is_told_by_its_file() {
        for language in Language::value_variants() {
            assert_eq!(Language::of(folder(&[language.marker(), "README.md"]).path()).unwrap(), *language);
        }
        let none = Language::of(folder(&["README.md"]).path()).unwrap_err().to_string();
        assert!(none.contains("Cargo.toml") && none.contains("policy.wat"), "{none}");
        let two = Language::of(folder(&["policy.c", "policy.zig"]).path()).unwrap_err().to_string();
        assert!(two.contains("policy.c, policy.zig"), "{two}");
    }

    #[test]
    fn a_policy_has_its_manifest_s_name_or_the_folder_s() {
        assert_eq!(
            policy_name(folder(&["my-gate.toml", "Cargo.toml", "policy.c"]).path()).unwrap(),
            "my-gate"
        );
        assert_eq!(policy_name(folder(&["a.toml", "b.toml"]).path()).unwrap(), "gate-");
        let missing = folder(&["policy.wat"]).path().join("plugins/gate.wasm");
        let error = folder_of(&missing).unwrap_err().to_string();
        assert!(error.ends_with("plugins is no folder, make it first"), "{error}");
        assert_eq!(folder_of(Path::new("-")).unwrap(), None);
        let upper = folder(&[]).path().join("Upper");
        std::fs::create_dir_all(&upper).unwrap();
        assert!(policy_name(&upper).unwrap_err().to_string().contains("--out"));
    }
}
