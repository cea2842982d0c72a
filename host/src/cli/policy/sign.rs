//! `forkpoint policy keygen` and `forkpoint policy sign`.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;

use super::super::files::write_file;
use super::print;
use crate::author::sign::SigningKey;
use crate::guest_tools::wasm_layer;
use crate::policy::is_policy_name;

#[derive(Debug, Args)]
pub(in crate::cli) struct KeygenArgs {
    /// The file to write the private key to, for its owner alone; one that is there is kept.
    file: PathBuf,
}

impl KeygenArgs {
    pub(super) fn run(self) -> Result<()> {
        let text = SigningKey::generate()?;
        let public = SigningKey::read(text.as_bytes())?.public();
        write_secret(&self.file, &text)?;
        // The key of a TOML table, as it need not be a bare one.
        let name = self.file.file_stem().unwrap_or_default().to_string_lossy();
        let bare = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let name = if name.chars().all(bare) { name.into_owned() } else { format!("{name:?}") };
        print(&format!("{name} = \"{public}\"\n"))
    }
}

/// Writes a file that is not there yet, for its owner alone.
fn write_secret(path: &Path, text: &str) -> Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.mode(0o600);
    }
    let mut file =
        options.open(path).with_context(|| format!("cannot make the new file {}", path.display()))?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    written.with_context(|| format!("cannot write {}", path.display()))
}

#[derive(Debug, Args)]
pub(in crate::cli) struct SignArgs {
    /// The component NAME.wasm; NAME.toml beside it gets the lines sha256 and signature, and is made where it is missing.
    component: PathBuf,
    /// The private key: ed25519, PKCS#8 in PEM, as keygen and OpenSSL write it.
    #[arg(long, value_name = "FILE")]
    key: PathBuf,
}

impl SignArgs {
    pub(super) fn run(self) -> Result<()> {
        let read =
            |path: &Path| std::fs::read(path).with_context(|| format!("cannot read {}", path.display()));
        let key = SigningKey::read(&read(&self.key)?)
            .with_context(|| format!("cannot sign with {}", self.key.display()))?;
        let name = self.component.file_stem().unwrap_or_default().to_string_lossy();
        if !is_policy_name(&name) || self.component.extension().is_none_or(|extension| extension != "wasm") {
            let name = self.component.display();
            bail!(
                "a policy is served by its file's name, NAME.wasm with 1 to 64 of a-z, 0-9, - and _; got {name}"
            );
        }
        let component = read(&self.component)?;
        if wasm_layer(&component) != Some(1) {
            bail!("{} is not a component", self.component.display());
        }
        let path = self.component.with_extension("toml");
        let manifest = match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            read => read.with_context(|| format!("cannot read {}", path.display()))?,
        };
        let signed = key
            .sign(&name, &component, &manifest)
            .with_context(|| format!("cannot sign {}", path.display()))?;
        write_file(&path, signed.as_bytes())?;
        print(&format!("{}: signed by {}\n", path.display(), key.public()))
    }
}
