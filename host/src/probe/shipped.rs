//! What a policy ships for its probes: files of a folder beside it, and tables of its manifest.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forkpoint_engine::probe::{Examples, MAX_ARTIFACT, MAX_BYTES, Probe};

use crate::policy::{Manifest, is_policy_name};

/// Most probes that a policy may ship.
pub(crate) const MAX_PROBES: usize = 16;

/// Where a policy's probes come from.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    /// `name.probes`.
    folder: PathBuf,
    /// Examples in its manifest, by the probe's name.
    tables: BTreeMap<String, Arc<Examples>>,
    /// The manifest is signed, and the folder is not: no fitted probe of it stands for a table.
    signed: bool,
}

/// What is shipped under one name.
pub(crate) struct Shipped {
    pub(crate) examples: Result<Arc<Examples>, String>,
    /// A probe that was shipped beside them.
    pub(crate) artifact: Option<Probe>,
    /// The examples are signed: no probe that anybody else fitted stands for them.
    pub(crate) signed: bool,
}

impl Origin {
    pub(crate) fn new(folder: PathBuf, manifest: Option<&Manifest>) -> Self {
        let tables = manifest.map(|manifest| manifest.probes.clone()).unwrap_or_default();
        let signed = manifest.is_some_and(|manifest| manifest.signature.is_some());
        Self { folder, tables, signed }
    }

    /// The probes by name: at most [`MAX_PROBES`], those of the manifest first.
    pub(crate) fn read(&self) -> BTreeMap<String, Shipped> {
        let table = |(name, examples): (&String, &Arc<Examples>)| {
            let artifact = if self.signed { None } else { self.artifact(name) };
            (name.clone(), Shipped { examples: Ok(Arc::clone(examples)), artifact, signed: self.signed })
        };
        let mut shipped: BTreeMap<String, Shipped> = self.tables.iter().map(table).collect();
        // Most policies have no such folder.
        let Ok(entries) = std::fs::read_dir(&self.folder) else { return shipped };
        let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        paths.sort();
        let mut left_out = Vec::new();
        for path in paths {
            let Some(name) = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".jsonl")) else {
                continue;
            };
            if !is_policy_name(name) {
                tracing::warn!(target: "policy", ?path, "not a probe: its name is 1 to 64 of a-z, 0-9, - and _");
                continue;
            }
            if self.tables.contains_key(name) {
                let examples = Err(self.twice(name));
                shipped.insert(name.to_owned(), Shipped { examples, artifact: None, signed: false });
                continue;
            }
            if shipped.len() == MAX_PROBES {
                left_out.push(path);
                continue;
            }
            let examples = read_examples(&path).map(Arc::new);
            let artifact = self.artifact(name);
            shipped.insert(name.to_owned(), Shipped { examples, artifact, signed: false });
        }
        if !left_out.is_empty() {
            tracing::warn!(target: "policy", ?left_out, "a policy has at most {MAX_PROBES} probes");
        }
        shipped
    }

    /// The folder's name and a file of it.
    pub(crate) fn file(&self, name: &str) -> String {
        let folder = self.folder.file_name().unwrap_or_default().to_string_lossy();
        format!("{folder}/{name}.jsonl")
    }

    /// Nobody knows which is meant.
    fn twice(&self, name: &str) -> String {
        format!("has examples in the manifest's table [probes.{name}] and in {}: keep one", self.file(name))
    }

    fn artifact(&self, name: &str) -> Option<Probe> {
        read_artifact(&self.folder.join(format!("{name}.probe.json")))
    }
}

fn read_examples(path: &Path) -> Result<Examples, String> {
    let text = read_text(path, MAX_BYTES)?;
    Examples::parse(&text).map_err(|error| error.to_string())
}

/// A fitted probe; a file that is none is as good as absent, and said so.
pub(crate) fn read_artifact(path: &Path) -> Option<Probe> {
    if !path.exists() {
        return None;
    }
    let read = read_text(path, MAX_ARTIFACT);
    let read = read.and_then(|text| Probe::from_json(&text).map_err(|error| error.to_string()));
    read.inspect_err(|error| tracing::warn!(target: "policy", ?path, error, "left out")).ok()
}

/// A file's text, of so many bytes at most and not from a pipe that never ends.
fn read_text(path: &Path, most: usize) -> Result<String, String> {
    let metadata = std::fs::metadata(path).map_err(|error| error.to_string())?;
    if !metadata.is_file() {
        return Err("not a file".to_owned());
    }
    let file = std::fs::File::open(path).map_err(|error| error.to_string())?;
    let mut text = String::new();
    file.take(most as u64 + 1).read_to_string(&mut text).map_err(|error| error.to_string())?;
    if text.len() > most {
        return Err(format!("{} bytes, the most is {most}", metadata.len()));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "{\"text\": \"a\", \"label\": \"yes\"}\n{\"text\": \"b\", \"label\": \"yes\"}\n\
                        {\"text\": \"c\", \"label\": \"no\"}\n{\"text\": \"d\", \"label\": \"no\"}\n";

    fn manifest(names: &[&str]) -> Manifest {
        let rows = [("a", true), ("b", true), ("c", false), ("e", false)];
        let rows = rows.map(|(text, label)| format!("{{ text = '{text}', label = {label} }},")).concat();
        let table = |name: &&str| format!("[probes.{name}]\nexamples = [{rows}]\n");
        Manifest::parse(&names.iter().map(table).collect::<String>()).unwrap()
    }

    #[test]
    fn files_and_tables_stand_side_by_side_and_one_name_for_both_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("gate.probes");
        std::fs::create_dir(&folder).unwrap();
        for name in ["file", "both", "broken", "Not a name"] {
            let text = if name == "broken" { "{}" } else { FILE };
            std::fs::write(folder.join(format!("{name}.jsonl")), text).unwrap();
        }
        let shipped = Origin::new(folder.clone(), Some(&manifest(&["table", "both"]))).read();
        assert_eq!(shipped.keys().collect::<Vec<_>>(), ["both", "broken", "file", "table"]);
        let examples = |name: &str| shipped[name].examples.as_ref().map(|examples| examples.hash);
        assert_eq!(examples("file"), Ok(Examples::parse(FILE).unwrap().hash));
        assert!(examples("table").is_ok() && examples("table") != examples("file"));
        assert!(examples("broken").unwrap_err().starts_with("line 1: "));
        let twice = examples("both").unwrap_err();
        assert!(twice.contains("[probes.both] and in gate.probes/both.jsonl"), "{twice}");
        assert!(Origin::new(dir.path().join("no.probes"), None).read().is_empty());
    }

    #[test]
    fn files_fill_what_tables_leave_of_the_most() {
        let dir = tempfile::tempdir().unwrap();
        for n in 0..MAX_PROBES {
            std::fs::write(dir.path().join(format!("f{n:02}.jsonl")), FILE).unwrap();
        }
        let shipped = Origin::new(dir.path().to_owned(), Some(&manifest(&["f15", "table"]))).read();
        assert_eq!(shipped.len(), MAX_PROBES);
        assert!(shipped.contains_key("table") && shipped.contains_key("f13") && !shipped.contains_key("f14"));
        assert!(shipped["f15"].examples.is_err(), "also one past the most");
    }

    #[test]
    fn a_fitted_probe_of_the_folder_stands_for_no_table_that_is_signed() {
        let dir = tempfile::tempdir().unwrap();
        let fitted =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../plugins/shell-gate.probes/shell.probe.json");
        for name in ["table", "file"] {
            std::fs::copy(&fitted, dir.path().join(format!("{name}.probe.json"))).unwrap();
        }
        std::fs::write(dir.path().join("file.jsonl"), FILE).unwrap();
        let plain = manifest(&["table"]);
        let (pin, signature) = ("0".repeat(64), format!("{}==", "A".repeat(86)));
        let signed = format!("sha256 = '{pin}'\nsignature = '{signature}'");
        let mut signed = Manifest::parse(&signed).unwrap();
        signed.probes.clone_from(&plain.probes);
        let artifacts = |manifest: &Manifest| {
            let shipped = Origin::new(dir.path().to_owned(), Some(manifest)).read();
            ["table", "file"].map(|name| shipped[name].artifact.is_some())
        };
        assert_eq!(artifacts(&plain), [true, true]);
        assert_eq!(
            artifacts(&signed),
            [false, true],
            "nothing in the folder is signed, so a file is no worse"
        );
    }
}
