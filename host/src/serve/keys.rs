//! API keys: optional, compared in constant time.

use std::path::Path;

use axum::http::{HeaderMap, header};
use sha2::{Digest, Sha256};

use crate::config::{ConfigError, ServerConfig};
use crate::models::hex;
use crate::wire::{ApiError, Kind};

/// The keys of clients and of operators, as hashes.
#[derive(Debug, Default)]
pub(super) struct Keys {
    /// None means that clients need no key.
    clients: Vec<[u8; 32]>,
    /// None means that nobody is an operator.
    operators: Vec<[u8; 32]>,
}

/// Who asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Access {
    /// Keeps the pages of the key's owner apart from those of other keys; empty where no key is asked for.
    pub(super) salt: String,
    /// Whether operators' routes are open.
    pub(super) operator: Operator,
}

/// Whether a request may change policies and read the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operator {
    /// Its key is an operator's.
    Yes,
    /// It is not.
    No,
    /// Nobody's is: the configuration names no such key.
    Nobody,
}

impl Keys {
    /// Reads the keys that the configuration points to.
    ///
    /// # Errors
    /// When it points to nothing, or to nothing with a key in it: better no server than an open one.
    pub(super) fn read(config: &ServerConfig) -> Result<Self, ConfigError> {
        let clients = read_keys("api_keys", config.api_keys_env.as_deref(), config.api_keys_file.as_deref())?;
        let operators =
            read_keys("admin_keys", config.admin_keys_env.as_deref(), config.admin_keys_file.as_deref())?;
        Ok(Self { clients, operators })
    }

    /// Checks a request's key, from `Authorization: Bearer`. An operator's opens everything.
    ///
    /// # Errors
    /// [`Kind::Unauthorized`].
    pub(super) fn check(&self, headers: &HeaderMap) -> Result<Access, ApiError> {
        let given = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.to_str().ok())
            .and_then(|value| value.split_once(' '))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
            .map(|(_, key)| hash(key.trim()));
        let operator = match given {
            _ if self.operators.is_empty() => Operator::Nobody,
            Some(given) if has(&self.operators, &given) => Operator::Yes,
            _ => Operator::No,
        };
        if self.clients.is_empty() {
            return Ok(Access { salt: String::new(), operator });
        }
        let Some(given) = given else {
            let message = "this server asks for an API key; send it as `Authorization: Bearer <key>`";
            return Err(ApiError::new(Kind::Unauthorized, message));
        };
        if operator == Operator::Yes || has(&self.clients, &given) {
            Ok(Access { salt: hex(&given[..8]), operator })
        } else {
            Err(ApiError::new(Kind::Unauthorized, "this API key is not known to the server"))
        }
    }
}

impl Operator {
    /// Lets operators pass.
    ///
    /// # Errors
    /// [`Kind::Forbidden`] says what is missing.
    pub(super) fn check(self) -> Result<(), ApiError> {
        let message = match self {
            Self::Yes => return Ok(()),
            Self::No => {
                "this route is for operators; send an operator's key as `Authorization: Bearer <key>`"
            }
            Self::Nobody => {
                "this route is for operators, and the server has no key of one: set server.admin_keys_env or \
                 server.admin_keys_file"
            }
        };
        Err(ApiError::new(Kind::Forbidden, message))
    }
}

fn read_keys(what: &str, env: Option<&str>, file: Option<&Path>) -> Result<Vec<[u8; 32]>, ConfigError> {
    let mut keys = Vec::new();
    if let Some(name) = env {
        let text = std::env::var(name).unwrap_or_default();
        let before = keys.len();
        keys.extend(text.split(',').map(str::trim).filter(|key| !key.is_empty()).map(hash));
        if keys.len() == before {
            let message = format!("the environment variable {name} holds no key");
            return Err(ConfigError::value(format!("server.{what}_env"), message));
        }
    }
    if let Some(path) = file {
        let text = std::fs::read_to_string(path)
            .map_err(|error| ConfigError::Read { path: path.to_owned(), error })?;
        let before = keys.len();
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        keys.extend(lines.map(hash));
        if keys.len() == before {
            let message = format!("{} holds no key", path.display());
            return Err(ConfigError::value(format!("server.{what}_file"), message));
        }
    }
    Ok(keys)
}

/// Every key is compared, whole: time tells neither which one nor how far it matched.
fn has(keys: &[[u8; 32]], given: &[u8; 32]) -> bool {
    keys.iter().fold(false, |known, key| known | same(key, given))
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

    fn clients(keys: &[&str]) -> Keys {
        Keys { clients: keys.iter().map(|key| hash(key)).collect(), operators: Vec::new() }
    }

    fn asked(keys: &Keys, authorization: &str) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert(header::AUTHORIZATION, HeaderValue::from_str(authorization).unwrap());
        keys.check(&headers).is_ok()
    }

    #[test]
    fn only_known_keys_pass() {
        let keys = clients(&["one", "two"]);
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
        assert_eq!(Keys::default().check(&HeaderMap::new()).unwrap().salt, "");
    }

    #[test]
    fn keys_have_salts_of_their_own() {
        let keys = clients(&["one", "two"]);
        let salt = |key: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, HeaderValue::from_str(&format!("Bearer {key}")).unwrap());
            keys.check(&headers).unwrap().salt
        };
        assert_eq!(salt("one"), salt("one"));
        assert_ne!(salt("one"), salt("two"));
    }

    #[test]
    fn an_operators_key_opens_everything_and_a_clients_does_not() {
        let with = |key: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, HeaderValue::from_str(&format!("Bearer {key}")).unwrap());
            headers
        };
        let keys = Keys { operators: vec![hash("root")], ..clients(&["one"]) };
        assert_eq!(keys.check(&with("root")).unwrap().operator, Operator::Yes);
        assert_eq!(keys.check(&with("one")).unwrap().operator, Operator::No);
        assert!(keys.check(&with("other")).is_err());
        // Without keys for clients everyone is one, and still no operator.
        let keys = Keys { operators: vec![hash("root")], clients: Vec::new() };
        assert_eq!(keys.check(&with("other")).unwrap().operator, Operator::No);
        let nobody = clients(&["one"]).check(&with("one")).unwrap().operator;
        assert!(nobody.check().unwrap_err().message.contains("admin_keys_env"));
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
