//! Where files lie that the user did not name a place for.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::models::hex;

/// What may be deleted at any time: `$FORKPOINT_CACHE`, else `$XDG_CACHE_HOME/forkpoint`, else `~/.cache/forkpoint`.
#[must_use]
pub fn cache_folder() -> PathBuf {
    set("FORKPOINT_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|cache| cache.join("forkpoint")))
        .or_else(|| set("HOME").map(|home| home.join(".cache").join("forkpoint")))
        .unwrap_or_else(|| std::env::temp_dir().join("forkpoint"))
}

/// What outlives a server of these plugins: a folder of its own in `$XDG_STATE_HOME/forkpoint`, else in
/// `~/.local/state/forkpoint`.
#[must_use]
pub fn state_folder(plugins: &Path) -> PathBuf {
    let all = set("XDG_STATE_HOME")
        .or_else(|| set("HOME").map(|home| home.join(".local").join("state")))
        .unwrap_or_else(std::env::temp_dir);
    // The name as it was given: a link to the release of the day is one folder to whoever set it.
    let plugins = std::path::absolute(plugins).unwrap_or_else(|_| plugins.to_owned());
    let hash = Sha256::digest(plugins.as_os_str().as_encoded_bytes());
    all.join("forkpoint").join(hex(&hash[..8]))
}

fn set(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_plugins_folder_has_a_state_of_its_own() {
        let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        assert_eq!(state_folder(one.path()), state_folder(&one.path().join(".")), "the same by another name");
        assert_ne!(state_folder(one.path()), state_folder(other.path()));
    }
}
