//! Whether a component is older than what it is built from.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::build::Language;
use super::quoted;

/// Warns where a source of the policy is newer than the component. The policy's folder is the component's, or that of
/// the cases that it is tested with.
pub(super) fn warn(component: &Path, cases: Option<&Path>) {
    let beside = component.canonicalize().ok().and_then(|path| path.parent().map(Path::to_owned));
    let folders = [beside, cases.and_then(policy_of)];
    let found = folders.iter().flatten().find_map(|dir| Some((dir, newer(component, dir)?)));
    if let Some((dir, source)) = found {
        let (source, component, dir) = (source.display(), component.display(), quoted(dir));
        eprintln!(
            "warning: {source} is newer than {component}; to build it again: forkpoint policy build {dir}"
        );
    }
}

/// The folder of the policy whose cases these are: the one with `tests` in it, which may be named itself.
fn policy_of(cases: &Path) -> Option<PathBuf> {
    let full = cases.canonicalize().ok()?;
    let tests = full.ancestors().take(3).find(|folder| folder.file_name() == Some(OsStr::new("tests")));
    Some(tests.and_then(Path::parent).unwrap_or(&full).to_owned())
}

/// A source of the policy in this folder that was changed after the component was.
fn newer(component: &Path, dir: &Path) -> Option<PathBuf> {
    let language = Language::of(dir).ok()?;
    let built = changed(component)?;
    let mut sources = vec![dir.join(language.marker())];
    let own = |path: &Path| {
        let extension = path.extension().and_then(OsStr::to_str).unwrap_or_default();
        path.is_file() && language.modules().contains(&extension)
    };
    sources.extend(entries(dir).into_iter().filter(|path| own(path)));
    for folder in ["src", "assembly"] {
        walk(&dir.join(folder), &mut sources);
    }
    sources.into_iter().find(|source| changed(source).is_some_and(|at| at > built))
}

fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
    for path in entries(dir) {
        if path.is_dir() {
            walk(&path, found);
        } else {
            found.push(path);
        }
    }
}

/// What a folder holds; nothing where it cannot be read.
fn entries(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().filter_map(Result::ok);
    entries.map(|entry| entry.path()).collect()
}

fn changed(path: &Path) -> Option<SystemTime> {
    std::fs::metadata(path).and_then(|metadata| metadata.modified()).ok()
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::Duration;

    use super::*;

    /// A policy's folder with these files, the first the oldest, each a second after the one before.
    fn folder(files: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (second, file) in (1..).zip(files.split(' ')) {
            let path = dir.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            let at = SystemTime::UNIX_EPOCH + Duration::from_secs(second);
            File::create(path).unwrap().set_modified(at).unwrap();
        }
        dir
    }

    #[test]
    fn a_source_after_the_component_is_found_and_nothing_else() {
        for (files, expected) in [
            ("policy.js gate.wasm gate.toml other.js", None),
            ("gate.wasm policy.js", Some("policy.js")),
            ("policy.c gate.wasm rules.h", Some("rules.h")),
            ("Cargo.toml gate.wasm target/x.rs tests/a/request.json", None),
            ("Cargo.toml gate.wasm src/rules/mod.rs", Some("src/rules/mod.rs")),
            ("asconfig.json gate.wasm assembly/rules.ts", Some("assembly/rules.ts")),
            ("gate.wasm README.md", None),
        ] {
            let dir = folder(files);
            let found = newer(&dir.path().join("gate.wasm"), dir.path());
            assert_eq!(found, expected.map(|file| dir.path().join(file)), "{files}");
        }
    }

    #[test]
    fn cases_are_of_the_policy_above_tests() {
        let dir = folder("gate/policy.js gate/tests/one/request.json");
        let gate = dir.path().canonicalize().unwrap().join("gate");
        for cases in ["gate", "gate/tests", "gate/tests/one"] {
            assert_eq!(policy_of(&dir.path().join(cases)), Some(gate.clone()), "{cases}");
        }
        assert_eq!(policy_of(&dir.path().join("none")), None);
    }
}
