//! API keys: optional, compared in constant time.

use axum::http::{HeaderMap, header};
use sha2::{Digest, Sha256};

use crate::config::{ConfigError, ServerConfig};
use crate::models::hex;
use crate::wire::{ApiError, Kind};

/// The keys that clients may use, as hashes; none means that no key is asked for.
#[derive(Debug, Default)]
pub(super) struct Keys(Vec<[u8; 32]>);

impl Keys {
    /// Reads the keys that the configuration points to.
    ///
    /// # Errors
    /// When it points to nothing, or to nothing with a key in it: better no server than an open one.
    pub(super) fn read(config: &ServerConfig) -> Result<Self, ConfigError> {
        let mut keys = Vec::new();
        if let Some(name) = &config.api_keys_env {
            let text = std::env::var(name).unwrap_or_default();
            let before = keys.len();
            keys.extend(text.split(',').map(str::trim).filter(|key| !key.is_empty()).map(hash));
            if keys.len() == before {
                let message = format!("the environment variable {name} holds no key");
                return Err(ConfigError::value("server.api_keys_env", message));
            }
        }
        if let Some(path) = &config.api_keys_file {
            let text = std::fs::read_to_string(path)
                .map_err(|error| ConfigError::Read { path: path.clone(), error })?;
            let before = keys.len();
            let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
            keys.extend(lines.map(hash));
            if keys.len() == before {
                let message = format!("{} holds no key", path.display());
                return Err(ConfigError::value("server.api_keys_file", message));
            }
        }
        Ok(Self(keys))
    }

    /// Checks a request's key, from `Authorization: Bearer`. Returns the salt that keeps its owner's pages
    /// apart from those of other keys; empty where no key is asked for.
    ///
    /// # Errors
    /// [`Kind::Unauthorized`].
    pub(super) fn check(&self, headers: &HeaderMap) -> Result<String, ApiError> {
        if self.0.is_empty() {
            return Ok(String::new());
        }
        let given = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.to_str().ok())
            .and_then(|value| value.split_once(' '))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
            .map(|(_, key)| key.trim());
        let Some(given) = given else {
            let message = "this server asks for an API key; send it as `Authorization: Bearer <key>`";
            return Err(ApiError::new(Kind::Unauthorized, message));
        };
        let given = hash(given);
        // Every key is compared, whole: time tells neither which one nor how far it matched.
        let known = self.0.iter().fold(false, |known, key| known | same(key, &given));
        if known {
            Ok(hex(&given[..8]))
        } else {
            Err(ApiError::new(Kind::Unauthorized, "this API key is not known to the server"))
        }
    }
}

fn hash(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

/// Compares all bytes, whatever the first ones say.
fn same(left: &[u8; 32], right: &[u8; 32]) -> bool {
    std::hint::black_box(
        left.iter().zip(right).fold(0, |different, (left, right)| different | (left ^ right)),
    ) == 0
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn asked(keys: &Keys, authorization: &str) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert(header::AUTHORIZATION, HeaderValue::from_str(authorization).unwrap());
        keys.check(&headers).is_ok()
    }

    #[test]
    fn only_known_keys_pass() {
        let keys = Keys(vec![hash("one"), hash("two")]);
        for (authorization, passes) in [
            ("Bearer one", true),
            ("bearer two", true),
            ("Bearer three", false),
            ("Bearer on", false),
            ("Bearer onee", false),
            ("Bearer ", false),
            ("Basic one", false),
            ("one", false),
        ] {
            assert_eq!(asked(&keys, authorization), passes, "{authorization}");
        }
        assert!(keys.check(&HeaderMap::new()).is_err());
    }

    #[test]
    fn without_keys_everything_passes() {
        assert!(asked(&Keys::default(), "Bearer whatever"));
        assert_eq!(Keys::default().check(&HeaderMap::new()).unwrap(), "");
    }

    #[test]
    fn keys_have_salts_of_their_own() {
        let keys = Keys(vec![hash("one"), hash("two")]);
        let salt = |key: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, HeaderValue::from_str(&format!("Bearer {key}")).unwrap());
            keys.check(&headers).unwrap()
        };
        assert_eq!(salt("one"), salt("one"));
        assert_ne!(salt("one"), salt("two"));
    }

    #[test]
    fn a_file_with_no_key_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        let config = ServerConfig { api_keys_file: Some(path.clone()), ..ServerConfig::default() };
        assert!(Keys::read(&config).is_err(), "a file that is not there");
        std::fs::write(&path, "# nothing\n\n").unwrap();
        assert!(Keys::read(&config).is_err(), "a file without keys");
        std::fs::write(&path, "# team a\nsecret\n").unwrap();
        assert!(asked(&Keys::read(&config).unwrap(), "Bearer secret"));
    }
}
