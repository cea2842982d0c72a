//! What the engine's tests share. Each test file uses a part of it.
#![allow(dead_code, reason = "every test binary compiles all of it and uses some")]

pub(crate) mod folder_writer;
pub(crate) mod gguf_writer;
pub(crate) mod oracle;
pub(crate) mod reference;

use std::path::{Path, PathBuf};

use forkpoint_engine::{Engine, Options};

/// A folder or file of the repository's test data.
pub(crate) fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data").join(name)
}

/// SmolLM2-135M-Instruct Q4_1, as `forkpoint pull` leaves it.
pub(crate) fn smollm2() -> PathBuf {
    let set = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let cache = || {
        let home = || set("HOME").unwrap_or_default().join(".cache");
        set("FORKPOINT_CACHE").unwrap_or_else(|| set("XDG_CACHE_HOME").unwrap_or_else(home).join("forkpoint"))
    };
    let path =
        set("FORKPOINT_TEST_MODEL").unwrap_or_else(|| cache().join("models/smollm2-135m-instruct-q4_1.gguf"));
    assert!(path.is_file(), "{} is not there; run: cargo run --release -- pull smollm2-135m", path.display());
    path
}

/// An engine on a checkpoint.
pub(crate) fn engine(checkpoint: &Path, options: &Options) -> Engine {
    Engine::start(checkpoint, options).unwrap()
}
