//! Files that commands read and write; `-` is standard input and output.

use std::io::{Read, Write};
use std::path::Path;

use anyhow::{Context, Result};

pub(super) fn read_file(path: &Path) -> Result<Vec<u8>> {
    if path == Path::new("-") {
        let mut bytes = Vec::new();
        std::io::stdin().lock().read_to_end(&mut bytes).context("cannot read standard input")?;
        return Ok(bytes);
    }
    std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Writes beside the target and renames, so that a watcher never sees half a file.
pub(super) fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    if path == Path::new("-") {
        return std::io::stdout().lock().write_all(bytes).context("cannot write to standard output");
    }
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let failed = || format!("cannot write {}", path.display());
    let mut file = tempfile::Builder::new().prefix(".forkpoint-").tempfile_in(folder).with_context(failed)?;
    file.write_all(bytes).with_context(failed)?;
    let kept = file.persist(path).with_context(failed)?;
    share(&kept).with_context(failed)
}

/// Gives a file that was made for its owner alone the permissions that files usually have.
#[cfg(unix)]
fn share(file: &std::fs::File) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    file.set_permissions(std::fs::Permissions::from_mode(0o644))
}

#[cfg(not(unix))]
fn share(_file: &std::fs::File) -> std::io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_component_is_written_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.wasm");
        for bytes in [&b"one"[..], b"two"] {
            write_file(&path, bytes).unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), bytes);
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
