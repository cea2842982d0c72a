//! Policies in Rust: what must be there before cargo is worth running, and where it leaves the module.

use std::ffi::{OsStr, OsString};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::Job;
use super::tool::{CARGO, RUSTC, output, run_watched};

/// The target of policies in Rust: it has nothing of WASI.
const WASM: &str = "wasm32-unknown-unknown";

/// What says which linker cargo takes for it.
const LINKER: &str = "CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER";

/// What rustc links it with, where nothing else is named.
const RUST_LLD: &str = "rust-lld";

/// What makes both in a shell on Debian.
const DEBIAN: &str = "eval \"$(examples/toolchains.py rust)\"";

/// Whether cargo writes in colour, which it would not to one that passes on what it says.
const COLOUR: &str = "CARGO_TERM_COLOR";

/// Builds the policy's core module, and says where it lies.
pub(super) fn module(job: &Job<'_>) -> Result<PathBuf> {
    let mut rustc = RUSTC.command(job.dir)?;
    // From the folder, whose configuration and toolchain count.
    rustc.current_dir(job.dir).args(["--print", "target-libdir", "--target", WASM]);
    let libraries = output(&mut rustc)?;
    let libraries = Path::new(libraries.trim());
    if !holds_std(libraries) {
        bail!(
            "rustc has no standard library for {WASM}: rustup target add {WASM}; on Debian, {DEBIAN} builds one \
             (docs/languages.md)"
        );
    }
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| std::env::home_dir().map(|home| home.join(".cargo")));
    let found = has_rust_lld(libraries, std::env::var_os("PATH").as_deref());
    if !found && job.flags.is_empty() && !names_linker(std::env::vars_os(), job.dir, home.as_deref()) {
        bail!("there is no linker for {WASM}: {}", no_linker());
    }
    let manifest = job.dir.join("Cargo.toml");
    let mut cargo = CARGO.command(job.dir)?;
    cargo.current_dir(job.dir).args(["build", "--release", "--target", WASM]).args(job.flags);
    if std::io::stderr().is_terminal() && std::env::var_os(COLOUR).is_none() {
        cargo.env(COLOUR, "always");
    }
    let missing = format!("linker `{RUST_LLD}` not found");
    if run_watched(&mut cargo, &missing)? {
        bail!("cargo found no linker for {WASM}: {}", no_linker());
    }
    let mut cargo = CARGO.command(job.dir)?;
    cargo.current_dir(job.dir).args(["metadata", "--no-deps", "--format-version", "1"]);
    let metadata: serde_json::Value = serde_json::from_str(&output(&mut cargo)?).context("cargo metadata")?;
    cargo_module(&metadata, &manifest)
        .with_context(|| format!("{}: expected a library of crate-type cdylib", manifest.display()))
}

fn no_linker() -> String {
    format!(
        "set {LINKER} to an lld; rustup's rustc brings one, {RUST_LLD}, and on Debian {DEBIAN} sets it \
         (docs/languages.md)"
    )
}

fn holds_std(libraries: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(libraries) else { return false };
    entries.filter_map(Result::ok).any(|entry| entry.file_name().to_string_lossy().starts_with("libstd-"))
}

/// Whether rustc's own linker is where rustc looks for it: among the tools of a host of its, or on PATH. `libraries` is
/// `lib/rustlib/TARGET/lib` of its folder.
fn has_rust_lld(libraries: &Path, path: Option<&OsStr>) -> bool {
    let hosts = libraries.ancestors().nth(2).and_then(|hosts| std::fs::read_dir(hosts).ok());
    let own = hosts.into_iter().flatten().filter_map(Result::ok).map(|host| host.path().join("bin"));
    let mut folders = own.chain(path.into_iter().flat_map(std::env::split_paths));
    let name = format!("{RUST_LLD}{}", std::env::consts::EXE_SUFFIX);
    folders.any(|folder| folder.join(&name).is_file())
}

/// Whether something may name a linker: a variable of cargo's, or a configuration file of it that has the word.
fn names_linker(
    variables: impl Iterator<Item = (OsString, OsString)>,
    dir: &Path,
    cargo_home: Option<&Path>,
) -> bool {
    let mut names = variables.map(|(name, _)| name.to_string_lossy().into_owned());
    if names.any(|name| name == LINKER || name.ends_with("RUSTFLAGS") || name.contains("RUSTC_WRAPPER")) {
        return true;
    }
    let folders = dir.ancestors().map(|folder| folder.join(".cargo")).chain(cargo_home.map(Path::to_owned));
    let files = folders.flat_map(|folder| [folder.join("config.toml"), folder.join("config")]);
    // One that includes another file may take it from there.
    let may = |text: String| text.contains("linker") || text.contains("include");
    files.filter_map(|file| std::fs::read_to_string(file).ok()).any(may)
}

/// Where cargo leaves the module of the package whose manifest this is.
fn cargo_module(metadata: &serde_json::Value, manifest: &Path) -> Option<PathBuf> {
    let packages = metadata["packages"].as_array()?;
    let package = packages.iter().find(|p| p["manifest_path"].as_str() == manifest.to_str())?;
    let is_cdylib = |target: &&serde_json::Value| {
        target["kind"].as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind == "cdylib"))
    };
    let library = package["targets"].as_array()?.iter().find(is_cdylib)?;
    let file = format!("{}.wasm", library["name"].as_str()?.replace('-', "_"));
    Some(Path::new(metadata["target_directory"].as_str()?).join(WASM).join("release").join(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_module_of_a_package_is_found_in_cargo_s_metadata() {
        let metadata = serde_json::json!({
            "target_directory": "/t",
            "packages": [
                {"manifest_path": "/other/Cargo.toml", "targets": [{"name": "other", "kind": ["cdylib"]}]},
                {"manifest_path": "/gate/Cargo.toml", "targets": [
                    {"name": "tests", "kind": ["test"]},
                    {"name": "my-gate", "kind": ["cdylib", "rlib"]},
                ]},
            ],
        });
        let found = cargo_module(&metadata, Path::new("/gate/Cargo.toml"));
        assert_eq!(found.unwrap(), Path::new("/t/wasm32-unknown-unknown/release/my_gate.wasm"));
        assert_eq!(cargo_module(&metadata, Path::new("/none/Cargo.toml")), None);
    }

    #[test]
    fn rustc_s_linker_is_among_its_tools_or_on_the_path() {
        let dir = tempfile::tempdir().unwrap();
        let rustlib = dir.path().join("lib/rustlib");
        let (libraries, tools) = (rustlib.join(WASM).join("lib"), rustlib.join("a-host/bin"));
        for folder in [&libraries, &tools] {
            std::fs::create_dir_all(folder).unwrap();
        }
        assert!(!has_rust_lld(&libraries, None));
        let name = format!("{RUST_LLD}{}", std::env::consts::EXE_SUFFIX);
        std::fs::write(tools.join(&name), "").unwrap();
        assert!(has_rust_lld(&libraries, None));
        std::fs::rename(tools.join(&name), dir.path().join(name)).unwrap();
        assert!(!has_rust_lld(&libraries, None) && has_rust_lld(&libraries, Some(dir.path().as_os_str())));
    }

    #[test]
    fn a_linker_may_be_named_by_a_variable_or_by_any_configuration_of_cargo() {
        let dir = tempfile::tempdir().unwrap();
        let (policy, home) = (dir.path().join("policies/gate"), dir.path().join("home"));
        std::fs::create_dir_all(&policy).unwrap();
        let names = |variables: &[&str]| {
            let variables = variables.iter().map(|name| (OsString::from(name), OsString::from("x")));
            names_linker(variables, &policy, Some(&home))
        };
        assert!(!names(&["PATH", "CARGO", "CARGO_TARGET_DIR"]));
        for variable in [LINKER, "RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "CARGO_BUILD_RUSTFLAGS"] {
            assert!(names(&["PATH", variable]), "{variable}");
        }
        for folder in [dir.path().join("policies/.cargo"), home.clone()] {
            std::fs::create_dir_all(&folder).unwrap();
            let config = folder.join("config.toml");
            std::fs::write(&config, "[net]\noffline = true\n").unwrap();
            assert!(!names(&[]), "{}", config.display());
            std::fs::write(&config, format!("[target.{WASM}]\nlinker = 'lld'\n")).unwrap();
            assert!(names(&[]), "{}", config.display());
            std::fs::remove_file(&config).unwrap();
        }
    }
}
