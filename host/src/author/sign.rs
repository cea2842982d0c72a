//! Signing a policy: the key, and the lines of its manifest. What is signed is in
//! [`policy`](crate::policy::Signature).

use std::ops::Range;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ring::rand::{SecureRandom, SystemRandom};
use ring::signature::{Ed25519KeyPair, KeyPair};
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::pki_types::pem::PemObject;
use sha2::{Digest, Sha256};

use crate::models::hex;
use crate::policy::{Keys, Manifest, ManifestError, PublicKey, statement};

/// What stands before the 32 bytes of a private key in PKCS#8, version 1 (RFC 8410, section 7): the form that OpenSSL
/// writes and reads.
const PKCS8: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

/// Why a policy was not signed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SignError {
    /// The file holds no key that signs.
    #[error("expected an ed25519 key, PKCS#8 in PEM (\"-----BEGIN PRIVATE KEY-----\"), not encrypted: {0}")]
    Key(String),
    /// The system gives no random numbers.
    #[error("the system gives no random numbers")]
    Random,
    /// The manifest cannot be read.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// The manifest is written in a way that hides where a line can be added.
    #[error(
        "cannot find where sha256 and signature belong in the manifest; write both on lines of their own above the \
         tables, with any values that can be, and sign again"
    )]
    Place,
}

/// A private key.
pub struct SigningKey(Ed25519KeyPair);

impl SigningKey {
    /// A new key, as the text of its file.
    ///
    /// # Errors
    /// [`SignError::Random`].
    pub fn generate() -> Result<String, SignError> {
        let mut seed = [0; 32];
        SystemRandom::new().fill(&mut seed).map_err(|_| SignError::Random)?;
        let body = STANDARD.encode([&PKCS8[..], &seed].concat());
        Ok(format!("-----BEGIN PRIVATE KEY-----\n{body}\n-----END PRIVATE KEY-----\n"))
    }

    /// Reads the text of a key's file.
    ///
    /// # Errors
    /// [`SignError::Key`].
    pub fn read(pem: &[u8]) -> Result<Self, SignError> {
        let key =
            PrivatePkcs8KeyDer::from_pem_slice(pem).map_err(|error| SignError::Key(error.to_string()))?;
        // OpenSSL writes no public key beside the private one, so there is none to check it with.
        Ed25519KeyPair::from_pkcs8_maybe_unchecked(key.secret_pkcs8_der())
            .map(Self)
            .map_err(|error| SignError::Key(error.to_string()))
    }

    /// What tells others that a signature is this key's.
    #[must_use]
    pub fn public(&self) -> PublicKey {
        PublicKey::new(self.0.public_key().as_ref()).expect("ring's public key has 32 bytes")
    }

    /// The text of a policy's manifest with its pin and signature set, and every other byte as it is.
    ///
    /// # Errors
    /// When the manifest cannot be read.
    pub fn sign(&self, name: &str, component: &[u8], manifest: &str) -> Result<String, SignError> {
        let before = Manifest::parse(manifest)?;
        let hash = hex(&Sha256::digest(component));
        // The signature's line is not signed, but has to be there before the rest of the text is known.
        let text = set(manifest, "sha256", &hash);
        let text = set(&text, "signature", &STANDARD.encode([0; 64]));
        let placed = Manifest::parse(&text).ok().filter(|placed| placed.says_the_same(&before));
        let Some((signature, pin)) = placed.and_then(|placed| placed.signature.zip(placed.sha256)) else {
            return Err(SignError::Place);
        };
        if pin != hash {
            return Err(SignError::Place);
        }
        let signed = self.0.sign(statement(name, &hash, signature.manifest()).as_bytes());
        Ok(set(&text, "signature", &STANDARD.encode(signed)))
    }
}

/// Sets one of the values that `policy sign` writes: in its place, or on a line of its own where it has none.
fn set(text: &str, key: &str, value: &str) -> String {
    let keys = Keys::of(text);
    let (place, line): (Range<usize>, _) = match if key == "sha256" { keys.sha256 } else { keys.signature } {
        Some(place) => (place, format!("\"{value}\"")),
        None => {
            let end = end_of_keys(text);
            let feed = if end == 0 || text[..end].ends_with('\n') { "" } else { "\n" };
            (end..end, format!("{feed}{key} = \"{value}\"\n"))
        }
    };
    [&text[..place.start], &line, &text[place.end..]].concat()
}

/// Where the lines above the first table end: after the last one that holds something, or at the text's start.
fn end_of_keys(text: &str) -> usize {
    let mut end = 0;
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        at += line.len();
        match line.trim_start().chars().next() {
            Some('[') => break,
            None | Some('#') => {}
            Some(_) => end = at,
        }
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMPONENT: &[u8] = b"component";

    fn key() -> SigningKey {
        SigningKey::read(SigningKey::generate().unwrap().as_bytes()).unwrap()
    }

    #[test]
    fn a_key_is_read_as_it_was_written_and_no_two_are_the_same() {
        let text = SigningKey::generate().unwrap();
        let read = || SigningKey::read(text.as_bytes()).unwrap().public();
        assert_eq!(read(), read());
        assert_ne!(read(), key().public());
        let wrong = text.replace("PRIVATE KEY", "PUBLIC KEY");
        let short = "-----BEGIN PRIVATE KEY-----\nMC4CAQA=\n-----END PRIVATE KEY-----\n";
        for wrong in ["", "junk", wrong.as_str(), short] {
            let error = SigningKey::read(wrong.as_bytes()).err().expect(wrong).to_string();
            assert!(error.starts_with("expected an ed25519 key, PKCS#8 in PEM"), "{error}");
        }
    }

    #[test]
    fn every_other_byte_of_the_manifest_stays() {
        let key = key();
        let without = |text: &str| {
            let ours = |line: &&str| !line.starts_with("sha256") && !line.starts_with("signature");
            text.split_inclusive('\n').filter(ours).collect::<String>()
        };
        for manifest in [
            "",
            "fallback = \"reject\"\n",
            "# A gate.\r\n\r\nroutes = [\r\n  'a',\r\n]  # names\r\n\r\n# What it may do.\r\n[capabilities]\r\n",
            "[config]\nsignature = 'mine'\nsha256 = 'mine'\n",
            "# only a comment\n",
        ] {
            let signed = key.sign("gate", COMPONENT, manifest).unwrap();
            assert_eq!(without(&signed), without(manifest));
            assert!(Manifest::parse(&signed).unwrap().says_the_same(&Manifest::parse(manifest).unwrap()));
            // Signing it again changes nothing, and another component only the two values.
            assert_eq!(key.sign("gate", COMPONENT, &signed).unwrap(), signed);
            let other = key.sign("gate", b"other", &signed).unwrap();
            assert_ne!(other, signed);
            assert_eq!((other.len(), without(&other)), (signed.len(), without(&signed)));
        }
        let signed = key.sign("gate", COMPONENT, "fallback = 'next'").unwrap();
        assert!(signed.starts_with("fallback = 'next'\nsha256 = \""), "{signed}");
    }

    #[test]
    fn what_stands_in_an_unusual_place_is_not_guessed_at() {
        let key = key();
        let pin = "0".repeat(64);
        // A comment on the signature's line would not be signed.
        let shared = format!("sha256 = '{pin}'\nsignature = '{}' # mine\n", STANDARD.encode([0; 64]));
        assert!(matches!(key.sign("gate", COMPONENT, &shared), Err(SignError::Manifest(_))));
        assert!(matches!(key.sign("gate", COMPONENT, "fallbak = 'x'"), Err(SignError::Manifest(_))));
        let inside = "contract = \"\"\"\n[0.1]\"\"\"\n";
        assert!(matches!(key.sign("gate", COMPONENT, inside), Err(SignError::Place)));
    }
}
