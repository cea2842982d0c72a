//! A policy's manifest: which it is, and that it goes where the component goes.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::cli::files::write_file;
use crate::policy::is_policy_name;

/// The manifest in a policy's folder: the only one, or that of the folder's name.
pub(super) fn find(dir: &Path) -> Result<Option<PathBuf>> {
    let entries = std::fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>()?;
    let mut manifests: Vec<PathBuf> = paths.into_iter().filter(|path| is_manifest(path)).collect();
    if manifests.len() > 1 {
        manifests.retain(|path| path.file_stem() == dir.file_name());
    }
    Ok(manifests.pop())
}

fn is_manifest(path: &Path) -> bool {
    let others = ["pyproject", "clippy", "rustfmt", "forkpoint"];
    let stem = path.file_stem().and_then(OsStr::to_str).unwrap_or_default();
    // `Cargo` is no policy's name, with its capital letter.
    path.extension().is_some_and(|extension| extension == "toml")
        && is_policy_name(stem)
        && !others.contains(&stem)
}

/// Copies a manifest to beside a component that goes elsewhere, unless one is there: it may be an operator's. Says what
/// came of it, where anything did.
pub(super) fn place(manifest: &Path, component: &Path) -> Result<Option<String>> {
    let beside = component.with_extension("toml");
    let cannot_read = |path: &Path| format!("cannot read {}", path.display());
    let own = std::fs::read(manifest).with_context(|| cannot_read(manifest))?;
    match std::fs::read(&beside) {
        Ok(there) if there == own => Ok(None),
        Ok(_) => {
            let name = manifest.file_name().unwrap_or_default().display();
            Ok(Some(format!("kept {}; the policy's own {name} differs", beside.display())))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            write_file(&beside, &own)?;
            Ok(Some(format!("wrote {}", beside.display())))
        }
        Err(error) => Err(error).with_context(|| cannot_read(&beside)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manifest_is_the_only_one_or_the_folder_s() {
        let dir = tempfile::tempdir().unwrap();
        let gate = dir.path().join("gate");
        std::fs::create_dir(&gate).unwrap();
        let write = |name: &str| std::fs::write(gate.join(name), "").unwrap();
        for other in ["Cargo.toml", "pyproject.toml", "policy.c"] {
            write(other);
        }
        assert_eq!(find(&gate).unwrap(), None);
        write("other.toml");
        assert_eq!(find(&gate).unwrap(), Some(gate.join("other.toml")));
        write("gate.toml");
        assert_eq!(find(&gate).unwrap(), Some(gate.join("gate.toml")));
        std::fs::rename(gate.join("gate.toml"), gate.join("more.toml")).unwrap();
        assert_eq!(find(&gate).unwrap(), None, "neither is the policy's");
    }

    #[test]
    fn a_manifest_goes_beside_the_component_and_over_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let (own, component) = (dir.path().join("my-gate.toml"), dir.path().join("plugins/gate.wasm"));
        std::fs::create_dir(dir.path().join("plugins")).unwrap();
        std::fs::write(&own, "fallback = 'reject'\n").unwrap();
        let beside = dir.path().join("plugins/gate.toml");
        let place = || place(&own, &component).unwrap();
        assert_eq!(place(), Some(format!("wrote {}", beside.display())));
        assert_eq!(std::fs::read(&beside).unwrap(), std::fs::read(&own).unwrap());
        assert_eq!(place(), None, "the same is there");
        std::fs::write(&beside, "fallback = 'next'\n").unwrap();
        let kept = format!("kept {}; the policy's own my-gate.toml differs", beside.display());
        assert_eq!(place(), Some(kept));
        assert_eq!(std::fs::read_to_string(&beside).unwrap(), "fallback = 'next'\n");
    }
}
