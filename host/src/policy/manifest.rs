//! What a policy says of itself: `name.toml` beside `name.wasm`, or the component's own section
//! `forkpoint:manifest` with the same text. A bare component runs without.
//!
//! ```
//! let manifest = forkpoint::policy::Manifest::parse(r#"
//!     description = "Refuses what would destroy data."
//!     fallback = "reject"
//!
//!     [capabilities]                 # with this table: these and no others
//!     log = true
//!
//!     [limits]
//!     decisions = 4
//!
//!     [config]
//!     deny-at = 0.8
//! "#)?;
//! assert_eq!(manifest.config["deny-at"], "0.8");
//! # Ok::<(), forkpoint::policy::ManifestError>(())
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use forkpoint_engine::Examples;
use forkpoint_engine::probe::MAX_BYTES;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use super::capabilities::{Capabilities, Names};
use super::limits::SomeLimits;
use super::probe_tables::ProbeTables;
use super::settings::{Fallback, is_policy_name};
use super::share::Share;
use super::signature::{Keys, Signature};

/// The custom section of a component that may hold its manifest.
pub const MANIFEST_SECTION: &str = "forkpoint:manifest";

/// Longest manifest, in bytes: the examples of a probe may be in it.
pub(super) const MAX_MANIFEST: u64 = MAX_BYTES as u64;

/// A policy's manifest.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Manifest {
    /// What the policy does, in a line.
    #[serde(deserialize_with = "line")]
    pub description: Option<String>,
    /// The version of the contract that the component was built against, such as `0.1`.
    pub contract: Option<String>,
    /// More model names that the policy answers.
    #[serde(deserialize_with = "names")]
    pub routes: BTreeSet<String>,
    /// What a fault leads to.
    pub fallback: Option<Fallback>,
    /// The SHA-256 that the component must have, in hexadecimal digits.
    #[serde(deserialize_with = "digest")]
    pub sha256: Option<String>,
    /// Who stands for that component with this manifest, under its name.
    pub signature: Option<Signature>,
    /// The share of sessions that the policy is asked for without its plan being carried out.
    pub shadow: Option<Share>,
    /// How a new version of the component takes over from the one before.
    pub canary: Option<Canary>,
    /// The policy keeps nothing of a call in its memory that changes what another leads to: an instance may be called
    /// again, where the operator keeps any (`plugins.warm_instances`).
    pub stateless: bool,
    /// Capabilities asked for; without the table, all that are granted.
    #[serde(deserialize_with = "capabilities")]
    pub capabilities: Option<Capabilities>,
    /// Bounds asked for.
    #[serde(deserialize_with = "limits")]
    pub limits: SomeLimits,
    /// Values that the policy reads with `config(key)`.
    #[serde(deserialize_with = "values")]
    pub config: BTreeMap<String, String>,
    /// Examples of probes, by the probe's name.
    #[serde(skip)]
    pub probes: BTreeMap<String, Arc<Examples>>,
    /// The same as they are written, until the manifest is read.
    #[serde(rename = "probes")]
    probe_tables: ProbeTables,
    /// As it was read.
    #[serde(skip)]
    pub(super) text: String,
}

/// `[canary]`: a new version begins on a share of the sessions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Canary {
    /// Of the sessions, by a hash that stays the same for a conversation.
    pub share: Share,
    /// The share of its calls that may fail before it is rolled back, once there are
    /// [`Self::ENOUGH`]; none leaves that to the operator.
    #[serde(default)]
    pub rollback_at: Option<Share>,
    /// Calls after which it is promoted; none leaves that to the operator.
    #[serde(default)]
    pub promote_after: Option<u64>,
}

impl Canary {
    /// Calls before a share of failures says anything.
    pub const ENOUGH: u64 = 20;
}

/// Why a manifest is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {message}")]
pub struct ManifestError {
    /// From 1.
    pub line: usize,
    /// From 1, in characters.
    pub column: usize,
    /// What was expected and what came.
    pub message: String,
}

impl ManifestError {
    /// At a byte of a text.
    pub(super) fn at(text: &str, at: usize, message: impl Into<String>) -> Self {
        let before = text.get(..at).unwrap_or_default();
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
        Self { line, column, message: message.into() }
    }
}

impl Manifest {
    /// Reads a manifest's text.
    ///
    /// # Errors
    /// Where a key does not exist or a value cannot be.
    pub fn parse(text: &str) -> Result<Self, ManifestError> {
        if text.len() as u64 > MAX_MANIFEST {
            let message = format!("{} bytes, a manifest has at most {MAX_MANIFEST}", text.len());
            return Err(ManifestError::at(text, 0, message));
        }
        let mut manifest: Self = toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start.min(text.len()));
            ManifestError::at(text, at, error.message().replace('\n', " "))
        })?;
        if let Some(signature) = &mut manifest.signature {
            signature.seal(text)?;
            if manifest.sha256.is_none() {
                return Err(Self::at_signature(text, "a signature is for the component that sha256 pins"));
            }
        }
        manifest.probes = std::mem::take(&mut manifest.probe_tables).read(text)?;
        text.clone_into(&mut manifest.text);
        Ok(manifest)
    }

    /// Whether two say the same, but for which component they pin and who signed it.
    pub(crate) fn says_the_same(&self, other: &Self) -> bool {
        let rest =
            |manifest: &Self| Self { sha256: None, signature: None, text: String::new(), ..manifest.clone() };
        rest(self) == rest(other)
    }

    fn at_signature(text: &str, message: &str) -> ManifestError {
        ManifestError::at(text, Keys::of(text).signature.map_or(0, |value| value.start), message)
    }

    /// The manifest in a component's own section, if it has one. It cannot be signed: it is a part of the component
    /// that a signature is for.
    pub(super) fn embedded(component: &[u8]) -> Option<Result<Self, ManifestError>> {
        let mut depth = 0usize;
        for payload in wasmparser::Parser::new(0).parse_all(component) {
            match payload.ok()? {
                // Sections of modules inside are theirs.
                wasmparser::Payload::ModuleSection { .. } | wasmparser::Payload::ComponentSection { .. } => {
                    depth += 1;
                }
                wasmparser::Payload::End(_) => depth = depth.saturating_sub(1),
                wasmparser::Payload::CustomSection(section)
                    if depth == 0 && section.name() == MANIFEST_SECTION =>
                {
                    let text = std::str::from_utf8(section.data());
                    return Some(match text {
                        Ok(text) => Self::parse(text).and_then(|manifest| match manifest.signature {
                            Some(_) => {
                                let message = "a signature stands in NAME.toml beside the component";
                                Err(Self::at_signature(text, message))
                            }
                            None => Ok(manifest),
                        }),
                        Err(error) => {
                            let message = format!("the section {MANIFEST_SECTION} is not text: {error}");
                            Err(ManifestError { line: 1, column: 1, message })
                        }
                    });
                }
                _ => {}
            }
        }
        None
    }
}

/// Text for people, in one line.
fn line<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    let text = String::deserialize(deserializer)?;
    if text.chars().any(char::is_control) || text.len() > 300 {
        return Err(D::Error::custom("a description is one line of at most 300 bytes"));
    }
    Ok(Some(text))
}

fn names<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeSet<String>, D::Error> {
    let names = BTreeSet::<String>::deserialize(deserializer)?;
    match names.iter().find(|name| !is_policy_name(name)) {
        Some(name) => Err(D::Error::custom(format!(
            "{name:?} cannot be a model name here: 1 to 64 of a-z, 0-9, - and _, a letter or digit first"
        ))),
        None => Ok(names),
    }
}

fn digest<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    let text = String::deserialize(deserializer)?.to_ascii_lowercase();
    if text.len() != 64 || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Err(D::Error::custom(format!("a SHA-256 has 64 hexadecimal digits, got {text:?}")));
    }
    Ok(Some(text))
}

fn capabilities<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Capabilities>, D::Error> {
    let capabilities = Capabilities::deserialize(deserializer)?;
    if capabilities.routes != Names::none() {
        return Err(D::Error::custom("routes stand above the tables: routes = [\"name\"]"));
    }
    Ok(Some(capabilities))
}

fn limits<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SomeLimits, D::Error> {
    let limits = SomeLimits::deserialize(deserializer)?;
    match limits.useless() {
        Some(name) => Err(D::Error::custom(format!("{name} = 0 leaves the policy nothing to run with"))),
        None => Ok(limits),
    }
}

/// A `[config]` table: text, numbers and booleans, all as text.
pub(crate) fn values<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, String>, D::Error> {
    struct Table;

    impl<'de> serde::de::Visitor<'de> for Table {
        type Value = BTreeMap<String, String>;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("a table of strings, numbers and booleans")
        }

        fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut table = BTreeMap::new();
            while let Some((key, value)) = map.next_entry::<String, Text>()? {
                table.insert(key, value.0);
            }
            Ok(table)
        }
    }

    deserializer.deserialize_map(Table)
}

/// A scalar as the text that a policy reads.
struct Text(String);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Scalar;

        impl serde::de::Visitor<'_> for Scalar {
            type Value = Text;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string, a number or a boolean (write lists as text)")
            }

            fn visit_str<E>(self, text: &str) -> Result<Text, E> {
                Ok(Text(text.to_owned()))
            }

            fn visit_bool<E>(self, value: bool) -> Result<Text, E> {
                Ok(Text(value.to_string()))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Text, E> {
                Ok(Text(value.to_string()))
            }

            fn visit_u64<E>(self, value: u64) -> Result<Text, E> {
                Ok(Text(value.to_string()))
            }

            fn visit_f64<E>(self, value: f64) -> Result<Text, E> {
                Ok(Text(value.to_string()))
            }
        }

        deserializer.deserialize_any(Scalar)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_manifest_is_read() {
        let manifest = Manifest::parse(
            r#"
            description = "d"
            contract = "0.1"
            routes = ["guarded"]
            fallback = "next"
            shadow = 0.25
            canary = { share = 0.1, rollback_at = 0.05, promote_after = 500 }
            stateless = true
            [capabilities]
            store = true
            [limits]
            decisions = 4
            [config]
            text = "a"
            number = 3
            share = 0.5
            on = true
            "#,
        )
        .unwrap();
        assert_eq!(manifest.fallback, Some(Fallback::Next));
        assert_eq!(manifest.shadow.unwrap().get(), 0.25);
        assert_eq!(manifest.canary.unwrap().promote_after, Some(500));
        assert!(manifest.stateless && manifest.capabilities.unwrap().store);
        let config: Vec<_> = manifest.config.values().map(String::as_str).collect();
        assert_eq!(config, ["3", "true", "0.5", "a"]);
        assert_eq!(Manifest::parse("").unwrap(), Manifest::default());
    }

    #[test]
    fn a_manifest_inside_a_component_cannot_be_signed() {
        let (pin, signature) = ("0".repeat(64), format!("{}==", "A".repeat(86)));
        let manifest = format!("sha256 = '{pin}'\nsignature = '{signature}'");
        assert!(Manifest::parse(&manifest).unwrap().signature.is_some());
        let name = MANIFEST_SECTION.as_bytes();
        let size = 1 + name.len() + manifest.len();
        // A custom section: its length in LEB128, here of two bytes, then its name with a length.
        let mut component = b"\0asm\x0d\0\x01\0\0".to_vec();
        component.extend([(size & 0x7f) as u8 | 0x80, (size >> 7) as u8, name.len() as u8]);
        component.extend(name);
        component.extend(manifest.as_bytes());
        let error = Manifest::embedded(&component).unwrap().unwrap_err();
        assert_eq!((error.line, error.column), (2, 13), "{error}");
        assert!(error.message.contains("NAME.toml beside the component"), "{error}");
    }

    #[test]
    fn what_cannot_be_is_refused_where_it_stands() {
        for (text, place, says) in [
            ("fallbak = 'next'", (1, 1), "unknown field `fallbak`"),
            ("\n[limits]\ncpu = 5", (3, 1), "unknown field `cpu`"),
            ("[limits]\n\n wall_ms = 0", (1, 1), "wall_ms = 0"),
            ("shadow = 1.5", (1, 10), "from 0 to 1, got 1.5"),
            ("shadow = 'yes'", (1, 10), "share from 0 to 1"),
            ("routes = ['A b']", (1, 10), "\"A b\" cannot be a model name"),
            ("sha256 = 'abc'", (1, 10), "64 hexadecimal digits"),
            ("description = \"a\\nb\"", (1, 15), "one line"),
            ("[config]\nlist = [1]", (2, 8), "a string, a number or a boolean"),
            ("stateless = 1", (1, 13), "boolean"),
            ("canary = {}", (1, 10), "missing field `share`"),
            ("[capabilities]\nroutes = ['a']", (1, 1), "above the tables"),
            ("signatur = 'x'", (1, 1), "unknown field"),
            ("fallback = ", (1, 12), ""),
        ] {
            let error = Manifest::parse(text).unwrap_err();
            assert!(error.message.contains(says), "{text}: {error}");
            assert_eq!((error.line, error.column), place, "{text}: {error}");
        }
        let most = usize::try_from(MAX_MANIFEST).unwrap();
        assert_eq!(Manifest::parse(&" ".repeat(most)).unwrap().probes.len(), 0);
        let error = Manifest::parse(&" ".repeat(most + 1)).unwrap_err();
        assert_eq!((error.line, error.column), (1, 1));
        assert!(error.message.contains("a manifest has at most 2097152"), "{error}");
    }
}
