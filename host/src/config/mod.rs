//! The configuration file, `forkpoint.toml`.
//!
//! Every table is optional, and so is the file. A key that does not exist is refused with its line.
//!
//! ```
//! let config = forkpoint::config::Config::parse(r#"
//!     [server]
//!     addr = "127.0.0.1:8000"
//!     max_body_bytes = "8MiB"
//!
//!     [routes]                                  # a model name for clients, and the policies it asks in order
//!     gated = ["shell-gate", "difficulty"]
//!
//!     [policies.shell-gate.limits]
//!     decisions = 8
//!
//!     [upstreams.strong]                        # where a policy may forward to
//!     url = "http://127.0.0.1:9000/v1"
//!     model = "large"
//! "#)?;
//! assert_eq!(config.routes["gated"], ["shell-gate", "difficulty"]);
//! # Ok::<(), forkpoint::config::ConfigError>(())
//! ```

mod bytes;
mod tables;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use forkpoint_engine::Tool;
use indexmap::IndexMap;
use serde::Deserialize;

pub use self::bytes::Bytes;
pub use self::tables::{
    JournalConfig, ModelConfig, PluginsConfig, ServerConfig, StateConfig, ToolConfig, TracesConfig,
    UpstreamConfig,
};
use crate::policy::{PolicyOptions, PolicyRules, is_policy_name};
use crate::traces::collector_url;

/// What `forkpoint.toml` says; what it does not say has the default.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// `[server]`: the HTTP side.
    pub server: ServerConfig,
    /// `[model]`: what is loaded and what it may use.
    pub model: ModelConfig,
    /// `[plugins]`: where policies come from.
    pub plugins: PluginsConfig,
    /// `[routes]`: model names that stand for a list of policies, asked in order.
    pub routes: IndexMap<String, Vec<String>>,
    /// `[state]`: what outlives the server.
    pub state: StateConfig,
    /// `[journal]`: the record of what was decided.
    pub journal: JournalConfig,
    /// `[traces]`: OpenTelemetry spans of requests.
    pub traces: TracesConfig,
    /// `[policies.<name>]`: what one policy may use.
    pub policies: BTreeMap<String, PolicyRules>,
    /// `[upstreams.<name>]`: model servers elsewhere.
    pub upstreams: BTreeMap<String, UpstreamConfig>,
    /// `[tools.<name>]`: tools that a policy may mount besides those of the request.
    pub tools: BTreeMap<String, ToolConfig>,
}

/// Why a configuration was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {path}: {error}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        error: std::io::Error,
    },
    /// It is not TOML, or has a key or type that does not exist. The message holds line and column.
    #[error("{}{error}", .path.as_ref().map(|path| format!("in {}: ", path.display())).unwrap_or_default())]
    Parse {
        /// The file, if it came from one.
        path: Option<PathBuf>,
        /// Where and what.
        error: Box<toml::de::Error>,
    },
    /// A value that parses, but cannot be used.
    #[error("{key}: {message}")]
    Value {
        /// The key, such as `routes.gated`.
        key: String,
        /// What was expected and what came.
        message: String,
    },
}

impl ConfigError {
    pub(crate) fn value(key: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Value { key: key.into(), message: message.into() }
    }
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// When it cannot be read, or says what it cannot mean.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| ConfigError::Read { path: path.to_owned(), error })?;
        match Self::parse(&text) {
            Err(ConfigError::Parse { error, .. }) => {
                Err(ConfigError::Parse { path: Some(path.to_owned()), error })
            }
            other => other,
        }
    }

    /// Reads a text.
    ///
    /// # Errors
    /// When it says what it cannot mean.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let config: Self = toml::from_str(text)
            .map_err(|error| ConfigError::Parse { path: None, error: Box::new(error) })?;
        config.check()?;
        Ok(config)
    }

    /// Checks that every policy which a route names is among those that are known: a name that is misspelt must not
    /// leave a guard unasked.
    ///
    /// # Errors
    /// Names the route, the policy and what is there.
    pub fn check_routes(&self, known: &BTreeSet<String>) -> Result<(), ConfigError> {
        let named = self.routes.iter().flat_map(|(route, chain)| chain.iter().map(move |one| (route, one)));
        let Some((route, missing)) = named.into_iter().find(|(_, policy)| !known.contains(*policy)) else {
            return Ok(());
        };
        let there: Vec<&str> = known.iter().map(String::as_str).collect();
        let there = if there.is_empty() {
            "no policy is there".to_owned()
        } else {
            format!("there are {}", there.join(", "))
        };
        let message = format!(
            "there is no {missing}.wasm in {}; {there}; plugins.allow_missing = true starts without it",
            self.plugins.dir.display()
        );
        Err(ConfigError::value(format!("routes.{route}"), message))
    }

    fn check(&self) -> Result<(), ConfigError> {
        for (name, chain) in &self.routes {
            let key = format!("routes.{name}");
            if chain.is_empty() {
                return Err(ConfigError::value(key, "a route needs at least one policy"));
            }
            if let Some(policy) = chain.iter().find(|policy| !is_policy_name(policy)) {
                return Err(ConfigError::value(key, format!("{policy:?} cannot be a policy's name")));
            }
            if let Some((_, twice)) = chain.iter().enumerate().find(|(at, name)| chain[..*at].contains(name))
            {
                let message = format!("{twice:?} is asked twice: a chain does not come back to a policy");
                return Err(ConfigError::value(key, message));
            }
        }
        if let Some(name) = self.policies.keys().find(|name| !is_policy_name(name)) {
            let message = "names have 1 to 64 of a-z, 0-9, - and _, and start with a letter or digit";
            return Err(ConfigError::value(format!("policies.{name}"), message));
        }
        if let Some(endpoint) = &self.traces.endpoint {
            collector_url("traces.endpoint", endpoint, true)?;
        }
        if self.plugins.require_signature && self.plugins.signers.is_empty() {
            let message = "needs a signer in [plugins.signers]: without one no policy can be served";
            return Err(ConfigError::value("plugins.require_signature", message));
        }
        let waiting = [
            ("plugins.warm_instances", self.plugins.warm_instances),
            ("plugins.ready_instances", self.plugins.ready_instances),
        ];
        for (key, value) in waiting {
            if value > PolicyOptions::MOST_WAITING {
                let message = format!("must be at most {}, got {value}", PolicyOptions::MOST_WAITING);
                return Err(ConfigError::value(key, message));
            }
        }
        let at_least_one = [
            ("server.max_in_flight", self.server.max_in_flight as u64),
            ("server.max_connections", self.server.max_connections as u64),
            ("server.max_body_bytes", self.server.max_body_bytes.0),
            ("server.request_timeout_ms", self.server.request_timeout_ms),
            ("plugins.concurrency", u64::from(self.places())),
            ("journal.max_file", self.journal.max_file.0),
            ("journal.max_total", self.journal.max_total.0),
        ];
        match at_least_one.iter().find(|(_, value)| *value == 0) {
            Some((key, _)) => Err(ConfigError::value(*key, "must be at least 1, got 0")),
            None => Ok(()),
        }
    }

    /// Calls of policies that there may be at once.
    #[must_use]
    pub fn places(&self) -> u32 {
        let said = self.plugins.concurrency.map(|places| places.min(PolicyOptions::MOST_PLACES));
        said.unwrap_or_else(|| PolicyOptions::places_for(self.server.max_in_flight))
    }

    /// What an operator should know of the places for calls of policies, where there are fewer than requests.
    pub(crate) fn few_places(&self) -> Option<String> {
        let (places, requests) = (self.places(), self.server.max_in_flight);
        (requests > places as usize).then(|| {
            format!(
                "plugins.concurrency gives calls of policies {places} places, and server.max_in_flight lets \
                 {requests} requests in: a call keeps its place while its prompt is prefilled, so once all are taken, \
                 other requests find their policies busy after {} ms (plugins.queue_wait_ms) and take the fallback",
                self.plugins.queue_wait_ms
            )
        })
    }

    /// The operator's tools, as the engine takes them.
    ///
    /// # Errors
    /// When a tool's parameters do not become JSON.
    pub fn operator_tools(&self) -> Result<Vec<Tool>, ConfigError> {
        self.tools
            .iter()
            .map(|(name, tool)| {
                let parameters = match &tool.parameters {
                    Some(table) => serde_json::to_value(table).map_err(|error| {
                        ConfigError::value(format!("tools.{name}.parameters"), error.to_string())
                    })?,
                    None => serde_json::json!({ "type": "object", "properties": {} }),
                };
                Ok(Tool { name: name.clone(), description: tool.description.clone(), parameters })
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fewer_places_than_requests_are_said_to_be_few() {
        let of = |text: &str| {
            let config = Config::parse(text).unwrap();
            (config.places(), config.few_places().is_some())
        };
        assert_eq!(of(""), (342, false));
        assert_eq!(of("server.max_in_flight = 30"), (40, false));
        assert_eq!(of("plugins.concurrency = 256"), (256, false));
        assert_eq!(of("plugins.concurrency = 64"), (64, true));
        assert_eq!(of("server.max_in_flight = 8\nplugins.concurrency = 8"), (8, false));
        assert_eq!(of("server.max_in_flight = 2_000"), (1_000, true), "no more can be had");
        assert_eq!(of("server.max_in_flight = 2_000\nplugins.concurrency = 5_000"), (1_000, true));
        let warning = Config::parse("plugins.concurrency = 64").unwrap().few_places().unwrap();
        for part in ["64 places", "256 requests", "2000 ms", "fallback"] {
            assert!(warning.contains(part), "{part}: {warning}");
        }
        assert!(Config::parse("plugins.concurrency = 0").is_err());
    }

    #[test]
    fn an_empty_file_is_the_default() {
        assert_eq!(Config::parse("").unwrap(), Config::default());
    }

    #[test]
    fn a_full_file_is_read() {
        let config = Config::parse(
            r#"
            [server]
            addr = "0.0.0.0:80"
            api_keys_env = "KEYS"
            max_body_bytes = 1000
            [model]
            source = "model.gguf"
            kv_memory = "2GiB"
            [plugins]
            dir = "policies"
            require_signature = true
            [plugins.signers]
            alice = "uf1Rf3A+3dqUkVFkYGN2TTBlIqPyO7nEjXQ0ZnAYRlE="
            [routes]
            gated = ["a", "b"]
            [policies.a]
            fallback = "reject"
            [upstreams.up]
            url = "http://h/v1"
            model = "m"
            headers = { x-team = "t" }
            [tools.bash]
            description = "Runs a command"
            parameters = { type = "object", properties = { command = { type = "string" } } }
            "#,
        )
        .unwrap();
        assert_eq!(config.server.addr.port(), 80);
        assert_eq!(config.model.kv_memory, Bytes(2 << 30));
        assert_eq!(config.upstreams["up"].timeout_ms, 60_000);
        assert!(config.plugins.require_signature);
        assert_eq!(
            config.plugins.signers["alice"].to_string(),
            "uf1Rf3A+3dqUkVFkYGN2TTBlIqPyO7nEjXQ0ZnAYRlE="
        );
        let tools = config.operator_tools().unwrap();
        assert_eq!(tools[0].parameters["properties"]["command"]["type"], "string");
    }

    #[test]
    fn a_route_names_policies_that_are_there() {
        let config = Config::parse("[routes]\none = ['a']\ntwo = ['a', 'gaet']").unwrap();
        let known = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<BTreeSet<_>>();
        config.check_routes(&known(&["a", "gaet", "b"])).unwrap();
        for (names, says) in [
            (&["a", "gate"][..], "routes.two: there is no gaet.wasm in plugins; there are a, gate;"),
            (&[], "routes.one: there is no a.wasm in plugins; no policy is there;"),
        ] {
            let error = config.check_routes(&known(names)).unwrap_err().to_string();
            assert!(
                error.starts_with(says) && error.ends_with("allow_missing = true starts without it"),
                "{error}"
            );
        }
    }

    #[test]
    fn mistakes_are_told_with_their_place() {
        let cases = [
            ("[server]\nadress = 'x'", "line 2, column 1"),
            ("[plugins]\nwarm_instances = 1_001", "plugins.warm_instances: must be at most 1000, got 1001"),
            ("[plugins]\nready_instances = 9_999", "plugins.ready_instances: must be at most 1000, got 9999"),
            ("[server]\nadress = 'x'", "unknown field `adress`, expected one of `addr`"),
            ("[server]\naddr = 'nowhere'", "line 2, column 8"),
            ("[model]\nkv_memory = 'lots'", "\"lots\" is not a size"),
            ("[model]\nkv_memory = -1", "must not be negative"),
            ("[model]\nkv_precision = 'fp8'", "must be bf16, int8 or int4, got \"fp8\""),
            ("[model]\nquantize = 'q4'", "must be int8 or int4, got \"q4\""),
            ("[plugins]\nrequire_signature = true", "plugins.require_signature: needs a signer"),
            ("[plugins.signers]\na = 'AAAA'", "line 2, column 5"),
            ("[plugins.signers]\na = 'AAAA'", "an ed25519 public key is 32 bytes in base64, got 3"),
            ("[plugins.signers]\na = 'x y'", "32 bytes in base64, got \"x y\""),
            ("[routes]\nx = []", "routes.x: a route needs at least one policy"),
            ("[routes]\nx = ['a', 'b', 'a']", "routes.x: \"a\" is asked twice"),
            ("[routes]\nx = ['A b']", "routes.x: \"A b\" cannot be a policy's name"),
            ("[policies.'A b']", "policies.A b: names have"),
            ("[upstreams.u]\nurl = 'http://h'", "missing field `model`"),
            ("[traces]\nendpoint = 'collector:4318'", "traces.endpoint: must start with http:// or https://"),
            ("[traces]\nendpoint = ''", "traces.endpoint: \"\" is not a URL"),
            ("[traces]\nsample = 1.5", "a share is from 0 to 1, got 1.5"),
            ("[server]\nmax_in_flight = 0", "server.max_in_flight: must be at least 1, got 0"),
        ];
        for (text, message) in cases {
            let error = Config::parse(text).unwrap_err().to_string();
            assert!(error.contains(message), "{text}\n{error}");
        }
    }
}
