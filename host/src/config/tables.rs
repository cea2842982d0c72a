//! The tables of `forkpoint.toml`, and what holds where they say nothing.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use forkpoint_engine::{KvPrecision, Quantize};
use serde::{Deserialize, Deserializer};

use super::Bytes;
use crate::policy::{PolicyOptions, PolicyRules, PublicKey, Share, SomeLimits};

/// `[server]`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServerConfig {
    /// Where it listens.
    pub addr: SocketAddr,
    /// An environment variable that holds API keys, separated by commas.
    pub api_keys_env: Option<String>,
    /// A file that holds API keys, one a line; `#` starts a comment.
    pub api_keys_file: Option<PathBuf>,
    /// An environment variable that holds the keys of operators, who may change policies and read the journal.
    pub admin_keys_env: Option<String>,
    /// A file of such keys.
    pub admin_keys_file: Option<PathBuf>,
    /// Largest body, after decompression.
    pub max_body_bytes: Bytes,
    /// Requests answered at once; more get 429.
    pub max_in_flight: usize,
    /// Open connections; more wait to be accepted.
    pub max_connections: usize,
    /// Milliseconds that a request may take, its stream included.
    pub request_timeout_ms: u64,
    /// Milliseconds that requests in flight have left when the server stops.
    pub drain_timeout_ms: u64,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            addr: SocketAddr::from(([127, 0, 0, 1], 8000)),
            api_keys_env: None,
            api_keys_file: None,
            admin_keys_env: None,
            admin_keys_file: None,
            max_body_bytes: Bytes(8 << 20),
            max_in_flight: PolicyOptions::REQUESTS,
            max_connections: 1024,
            request_timeout_ms: 600_000,
            drain_timeout_ms: 30_000,
        }
    }
}

impl ServerConfig {
    /// How long a request may take.
    #[must_use]
    pub fn request_timeout(&self) -> Duration {
        Duration::from_millis(self.request_timeout_ms)
    }

    /// How long a stop waits for requests in flight.
    #[must_use]
    pub fn drain_timeout(&self) -> Duration {
        Duration::from_millis(self.drain_timeout_ms)
    }
}

/// `[model]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// A built-in name, a `.gguf` file, a safetensors folder, or `hf:owner/repo/file.gguf`.
    pub source: String,
    /// More names that clients may call it by.
    pub aliases: Vec<String>,
    /// Memory for keys and values.
    pub kv_memory: Bytes,
    /// Threads; 0 takes one a core.
    pub threads: usize,
    /// How keys and values are kept: "bf16", "int8" or "int4".
    #[serde(deserialize_with = "word")]
    pub kv_precision: KvPrecision,
    /// What the weights of a bf16, f16 or f32 checkpoint are packed to: "int8" or "int4".
    #[serde(deserialize_with = "some_word")]
    pub quantize: Option<Quantize>,
    /// Tokens that a session may hold; 0 takes the model's own.
    pub context: usize,
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self {
            source: crate::models::DEFAULT.to_owned(),
            aliases: Vec::new(),
            kv_memory: Bytes(1 << 30),
            kv_precision: KvPrecision::default(),
            quantize: None,
            threads: 0,
            context: 0,
        }
    }
}

/// A word of a closed set.
fn word<'de, D: Deserializer<'de>, T: FromStr<Err = String>>(deserializer: D) -> Result<T, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}

fn some_word<'de, D: Deserializer<'de>, T: FromStr<Err = String>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    word(deserializer).map(Some)
}

/// `[plugins]`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PluginsConfig {
    /// Where `name.wasm` is dropped, replaced and removed.
    pub dir: PathBuf,
    /// Where compiled code is kept over restarts; none takes `policies` in the cache folder.
    pub cache: Option<PathBuf>,
    /// Calls of policies that there may be at once; none takes what [`ServerConfig::max_in_flight`] requests need.
    pub concurrency: Option<u32>,
    /// Instances of policies that call themselves stateless that may be kept between calls; 0 keeps none.
    pub warm_instances: u32,
    /// Instances that may be made ahead of their calls, over all policies; 0 makes none.
    pub ready_instances: u32,
    /// Milliseconds that a request waits for a place among them.
    pub queue_wait_ms: u64,
    /// Largest component file.
    pub max_file: Bytes,
    /// Start though a route names a policy that is not there: it comes later.
    pub allow_missing: bool,
    /// Fit probes from the examples beside policies, and keep the hidden states that they read.
    pub probes: bool,
    /// Serve no policy that is not signed by one of the signers.
    pub require_signature: bool,
    /// `[plugins.signers]`: whose signatures count, each with its ed25519 public key.
    pub signers: BTreeMap<String, PublicKey>,
    /// What holds for every policy, unless its manifest or its own table says otherwise.
    pub defaults: PolicyRules,
    /// The most that a manifest may ask for, unless the policy's own table says otherwise.
    pub ceiling: SomeLimits,
}

impl Default for PluginsConfig {
    fn default() -> Self {
        Self {
            dir: PathBuf::from("plugins"),
            cache: None,
            concurrency: None,
            warm_instances: 0,
            ready_instances: PolicyOptions::READY,
            queue_wait_ms: 2_000,
            max_file: Bytes(64 << 20),
            allow_missing: false,
            probes: true,
            require_signature: false,
            signers: BTreeMap::new(),
            defaults: PolicyRules::default(),
            ceiling: SomeLimits::default(),
        }
    }
}

/// `[state]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StateConfig {
    /// The folder for what policies store, for versions of policies and for the journal; `memory` keeps nothing. None
    /// takes one for this plugins folder among the user's.
    pub dir: Option<PathBuf>,
}

impl StateConfig {
    /// The word that keeps nothing.
    pub const MEMORY: &'static str = "memory";

    /// The folder for a server of these plugins; none keeps everything in memory.
    #[must_use]
    pub fn folder(&self, plugins: &Path) -> Option<PathBuf> {
        match &self.dir {
            Some(dir) if dir == Path::new(Self::MEMORY) => None,
            Some(dir) => Some(dir.clone()),
            None => Some(crate::folders::state_folder(plugins)),
        }
    }
}

/// `[journal]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct JournalConfig {
    /// Write it at all.
    pub enabled: bool,
    /// Write prompts, tools and granted headers down as well.
    pub prompts: bool,
    /// Its folder; none takes `journal` in the state's.
    pub dir: Option<PathBuf>,
    /// A file is followed by another once it has so many bytes.
    pub max_file: Bytes,
    /// The oldest files are removed once all have so many bytes.
    pub max_total: Bytes,
}

impl Default for JournalConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            prompts: false,
            dir: None,
            max_file: Bytes(64 << 20),
            max_total: Bytes(1 << 30),
        }
    }
}

/// `[traces]`. OpenTelemetry's environment variables count where it says nothing.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TracesConfig {
    /// Where a collector takes OTLP over HTTP, such as `http://127.0.0.1:4318`; `/v1/traces` is added. None, here
    /// and in the environment, makes no traces.
    pub endpoint: Option<String>,
    /// The share of requests that are traced, of those whose client has not decided that.
    pub sample: Share,
    /// What the server is called in its spans.
    pub service_name: Option<String>,
}

impl Default for TracesConfig {
    fn default() -> Self {
        Self { endpoint: None, sample: Share::ALL, service_name: None }
    }
}

/// `[upstreams.<name>]`: a server that speaks OpenAI's chat completions.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UpstreamConfig {
    /// Its base, such as `http://127.0.0.1:9000/v1`; `/chat/completions` is added.
    pub url: String,
    /// The model to name there, unless a policy names another.
    pub model: String,
    /// An environment variable that holds its key. The client's own key is never sent on.
    pub api_key_env: Option<String>,
    /// Milliseconds until its answer starts, and between two parts of it.
    #[serde(default = "default_upstream_timeout")]
    pub timeout_ms: u64,
    /// Headers sent with each request.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
}

fn default_upstream_timeout() -> u64 {
    60_000
}

/// `[tools.<name>]`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolConfig {
    /// What it does.
    pub description: Option<String>,
    /// JSON Schema of its arguments, as a table.
    #[serde(default)]
    pub parameters: Option<toml::Table>,
}
