//! Signatures of policies: who stands for a component under its name and with its manifest.
//!
//! An ed25519 signature (RFC 8032) is over a text of four lines, each with its line feed: `forkpoint policy 1`, the
//! policy's name, the SHA-256 of the component and the SHA-256 of the manifest's text without the line of its
//! `signature`, both in hexadecimal digits. Nothing that a policy may do, and no name that it is served by, can be
//! changed under a signature.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ring::signature::{ED25519, UnparsedPublicKey};
use serde::{Deserialize, Deserializer, de};
use sha2::{Digest, Sha256};
use toml::Spanned;

use super::loader::{LoadCode, LoadError};
use super::manifest::{Manifest, ManifestError};
use crate::models::hex;

/// The first line of what is signed. Another text under the same key is no policy.
const PURPOSE: &str = "forkpoint policy 1";

/// What is signed. `component` and `manifest` are SHA-256 in hexadecimal digits.
pub(crate) fn statement(name: &str, component: &str, manifest: &str) -> String {
    format!("{PURPOSE}\n{name}\n{component}\n{manifest}\n")
}

/// A manifest's signature.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    bytes: [u8; Self::BYTES],
    /// SHA-256 of the manifest's text without the signature's line, once that is known.
    manifest: String,
}

impl Signature {
    const BYTES: usize = 64;

    /// Reads its base64.
    fn parse(text: &str) -> Result<Self, String> {
        Ok(Self { bytes: decode("a signature", text)?, manifest: String::new() })
    }

    /// Finds the line of a signature in its manifest, and takes the SHA-256 of all the rest.
    ///
    /// # Errors
    /// When anything else stands on that line: it would not be signed.
    pub(super) fn seal(&mut self, text: &str) -> Result<(), ManifestError> {
        let Some(value) = Keys::of(text).signature else { return Ok(()) };
        let line = line_of(text, &value);
        let before = text[line.start..value.start].split_once('=');
        let alone = before.is_some_and(|(key, rest)| key.trim() == "signature" && rest.trim().is_empty())
            && text[value.end..line.end].trim().is_empty();
        if !alone {
            let message = "a signature has a line to itself: signature = \"…\"";
            return Err(ManifestError::at(text, value.start, message));
        }
        let rest = Sha256::new().chain_update(&text[..line.start]).chain_update(&text[line.end..]);
        self.manifest = hex(&rest.finalize());
        Ok(())
    }

    /// SHA-256 of the manifest's text without the signature's line.
    pub(crate) fn manifest(&self) -> &str {
        &self.manifest
    }
}

impl<'de> Deserialize<'de> for Signature {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::parse(&String::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

/// Where values that belong together stand in a manifest's text, in bytes, their quotes included.
pub(crate) struct Keys {
    pub(crate) sha256: Option<Range<usize>>,
    pub(crate) signature: Option<Range<usize>>,
}

impl Keys {
    /// Of a manifest that can be read.
    pub(crate) fn of(text: &str) -> Self {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Found {
            sha256: Option<Spanned<String>>,
            signature: Option<Spanned<String>>,
        }
        let found: Found = toml::from_str(text).unwrap_or_default();
        let span = |value: Option<Spanned<String>>| value.map(|value| value.span());
        Self { sha256: span(found.sha256), signature: span(found.signature) }
    }
}

/// The lines that a value stands on, the last line feed included.
fn line_of(text: &str, value: &Range<usize>) -> Range<usize> {
    let start = text[..value.start].rfind('\n').map_or(0, |at| at + 1);
    let end = text[value.end..].find('\n').map_or(text.len(), |at| value.end + at + 1);
    start..end
}

/// An ed25519 public key, 32 bytes, written in base64.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PublicKey([u8; Self::BYTES]);

impl PublicKey {
    const BYTES: usize = 32;

    pub(crate) fn new(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().map(Self).ok()
    }

    /// Whether this key's owner signed a text.
    fn signed(&self, text: &str, signature: &Signature) -> bool {
        UnparsedPublicKey::new(&ED25519, &self.0).verify(text.as_bytes(), &signature.bytes).is_ok()
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&STANDARD.encode(self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for PublicKey {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        decode("an ed25519 public key", text).map(Self)
    }
}

impl<'de> Deserialize<'de> for PublicKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

fn decode<const N: usize>(what: &str, text: &str) -> Result<[u8; N], String> {
    let bytes = STANDARD
        .decode(text)
        .map_err(|error| format!("{what} is {N} bytes in base64, got {text:?}: {error}"))?;
    <[u8; N]>::try_from(bytes).map_err(|bytes| format!("{what} is {N} bytes in base64, got {}", bytes.len()))
}

/// Whose signatures count, and whether there must be one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Signers {
    /// Their public keys, by name.
    pub keys: BTreeMap<String, PublicKey>,
    /// A policy that none of them signed is not served.
    pub required: bool,
}

impl Signers {
    /// Who signed a policy with this manifest, for the component that it pins; none where it is not signed, or where
    /// no signer is known. A component that the manifest does not pin is for
    /// [`check_pin`](super::loader::check_pin) to refuse.
    ///
    /// # Errors
    /// When a signature is by none of them, or must be there and is not.
    pub(super) fn judge(&self, name: &str, manifest: Option<&Manifest>) -> Result<Option<String>, LoadError> {
        let refused = |message| Err(LoadError::new(LoadCode::Signature, message));
        let signed = manifest.and_then(|manifest| manifest.signature.as_ref().zip(manifest.sha256.as_ref()));
        let names = || self.keys.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        let Some((signature, component)) = signed else {
            return match self.required {
                false => Ok(None),
                true => refused(format!(
                    "is not signed: this server asks for a signature by one of {} (plugins.require_signature), \
                     in {name}.toml beside the component",
                    names()
                )),
            };
        };
        if self.keys.is_empty() && !self.required {
            return Ok(None);
        }
        let text = statement(name, component, &signature.manifest);
        match self.keys.iter().find(|(_, key)| key.signed(&text, signature)) {
            Some((signer, _)) => Ok(Some(signer.clone())),
            None => refused(format!(
                "signed by none of the signers {}: by another key, under another name than {name:?}, for another \
                 component than sha256 {component}, or the manifest was changed since",
                names()
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use ring::signature::{Ed25519KeyPair, KeyPair};

    use super::*;

    const COMPONENT: &str = "1e38ac8a1e5b0ea5c0e4bca2f8cf1ee4a0e2a6a9d9a2f3c0b1d2e3f405162738";
    const REST: &str = "fallback = \"reject\"\n[config]\ndeny-at = 0.8\n";

    fn pair(seed: u8) -> Ed25519KeyPair {
        Ed25519KeyPair::from_seed_unchecked(&[seed; 32]).unwrap()
    }

    fn signers(required: bool, keys: &[(&str, u8)]) -> Signers {
        let key = |seed| PublicKey::new(pair(seed).public_key().as_ref()).unwrap();
        Signers { keys: keys.iter().map(|(name, seed)| ((*name).to_owned(), key(*seed))).collect(), required }
    }

    /// What a signer would write: the pin, the signature, then the rest.
    fn signed(seed: u8, name: &str, rest: &str) -> String {
        let pin = format!("sha256 = \"{COMPONENT}\"\n");
        let text = statement(name, COMPONENT, &hex(&Sha256::digest(format!("{pin}{rest}"))));
        let signature = STANDARD.encode(pair(seed).sign(text.as_bytes()));
        format!("{pin}signature = \"{signature}\"\n{rest}")
    }

    fn judge(signers: &Signers, name: &str, text: &str) -> Result<Option<String>, LoadError> {
        signers.judge(name, Some(&Manifest::parse(text).unwrap()))
    }

    #[test]
    fn what_is_signed_is_four_lines() {
        assert_eq!(statement("gate", "c0", "ab"), "forkpoint policy 1\ngate\nc0\nab\n");
    }

    #[test]
    fn a_signature_is_its_signers_for_one_name_component_and_manifest() {
        let known = signers(false, &[("alice", 1), ("bob", 2)]);
        let text = signed(2, "gate", REST);
        assert_eq!(judge(&known, "gate", &text).unwrap().as_deref(), Some("bob"));
        // Where its line stands is not signed.
        let line = text.lines().find(|line| line.starts_with("signature")).unwrap();
        let moved = format!("{line}\n{}", text.replace(&format!("{line}\n"), ""));
        assert_eq!(judge(&known, "gate", &moved).unwrap().as_deref(), Some("bob"));
        let other = COMPONENT.replace("1e38", "1e39");
        for (name, changed) in [
            ("other", text.clone()),
            ("gate", text.replace("0.8", "0.9")),
            ("gate", text.replace("reject", "generate")),
            ("gate", text.replace(COMPONENT, &other)),
            ("gate", format!("{text}# a comment\n")),
            ("gate", text.replace('\n', "\r\n")),
            ("gate", signed(3, "gate", REST)),
        ] {
            let error = judge(&known, name, &changed).unwrap_err();
            assert_eq!(error.code, LoadCode::Signature);
            assert!(error.message.contains("signed by none of the signers alice, bob"), "{error}");
        }
    }

    #[test]
    fn a_signature_is_asked_for_and_judged_as_the_operator_says() {
        let text = signed(1, "gate", REST);
        let nobody = signers(false, &[]);
        assert_eq!(judge(&nobody, "gate", &text), Ok(None), "it cannot be judged");
        let known = signers(false, &[("alice", 1)]);
        assert_eq!(known.judge("gate", None), Ok(None));
        assert_eq!(judge(&known, "gate", REST), Ok(None));
        for required in [signers(true, &[("alice", 1)]), signers(true, &[])] {
            for manifest in [None, Some(Manifest::parse(REST).unwrap())] {
                let error = required.judge("gate", manifest.as_ref()).unwrap_err();
                assert_eq!(error.code, LoadCode::Signature);
                assert!(error.message.contains("in gate.toml beside the component"), "{error}");
            }
        }
        assert_eq!(judge(&signers(true, &[("alice", 1)]), "gate", &text).unwrap().as_deref(), Some("alice"));
        assert_eq!(judge(&signers(true, &[]), "gate", &text).unwrap_err().code, LoadCode::Signature);
    }

    #[test]
    fn a_signature_that_cannot_be_one_is_told_where_it_stands() {
        let good = STANDARD.encode([0; 64]);
        let pin = format!("sha256 = \"{COMPONENT}\"");
        for (text, place, says) in [
            (format!("{pin}\nsignature = 'x!'"), (2, 13), "a signature is 64 bytes in base64, got \"x!\""),
            (format!("{pin}\nsignature = 'AAAA'"), (2, 13), "64 bytes in base64, got 3"),
            (format!("{pin}\nsignature = 7"), (2, 13), "expected a string"),
            (format!("{pin}\nsignature = '{good}' # by me"), (2, 13), "has a line to itself"),
            (format!("{pin}\n\"signature\" = '{good}'"), (2, 15), "has a line to itself"),
            (format!("signature = '{good}'\nfallback = 'next'"), (1, 13), "sha256"),
        ] {
            let error = Manifest::parse(&text).unwrap_err();
            assert_eq!((error.line, error.column), place, "{text}: {error}");
            assert!(error.message.contains(says), "{text}: {error}");
        }
        // A key of the policy's own is no signature.
        let own = Manifest::parse("[config]\nsignature = 'x'").unwrap();
        assert_eq!((own.signature, own.config["signature"].as_str()), (None, "x"));
    }

    #[test]
    fn a_public_key_is_read_as_it_is_written() {
        let key = signers(false, &[("a", 1)]).keys["a"];
        assert_eq!(key.to_string().parse(), Ok(key));
        for (wrong, says) in [("", "got 0"), ("AAAA", "got 3"), ("not base64", "got \"not base64\"")] {
            let error = wrong.parse::<PublicKey>().unwrap_err();
            assert!(
                error.contains("an ed25519 public key is 32 bytes in base64") && error.contains(says),
                "{error}"
            );
        }
    }
}
