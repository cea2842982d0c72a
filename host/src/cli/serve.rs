//! `forkpoint serve`, and the flags of every command that loads a model.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use forkpoint_engine::{KvPrecision, Quantize};

use super::{LogFormat, on_runtime, start_log};
use crate::config::{Bytes, Config};
use crate::serve;

/// Where the configuration lies when none is named.
const DEFAULT_CONFIG: &str = "forkpoint.toml";

/// What is loaded and what it may use, the same for every command that serves.
#[derive(Debug, Args)]
pub(super) struct ModelArgs {
    /// What to serve: a built-in name, a .gguf file, a safetensors folder, or hf:owner/repo/file.gguf
    /// [default: smollm2-135m].
    #[arg(long, env = "FORKPOINT_MODEL", value_name = "MODEL")]
    model: Option<String>,
    /// The folder where policies are dropped as name.wasm [default: plugins].
    #[arg(long, env = "FORKPOINT_PLUGINS", value_name = "DIR")]
    plugins: Option<PathBuf>,
    /// The configuration file [default: forkpoint.toml, if there is one].
    #[arg(long, env = "FORKPOINT_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Memory for keys and values, such as 1GiB [default: 1GiB; of bench: what it needs].
    #[arg(long, env = "FORKPOINT_KV_MEMORY", value_name = "SIZE")]
    pub(super) kv_memory: Option<Bytes>,
    /// How keys and values are kept: bf16, int8 or int4 [default: bf16].
    #[arg(long, env = "FORKPOINT_KV_PRECISION", value_name = "PRECISION")]
    kv_precision: Option<KvPrecision>,
    /// Pack the weights of a bf16, f16 or f32 checkpoint to int8 or int4 as they are loaded.
    #[arg(long, env = "FORKPOINT_QUANTIZE", value_name = "WEIGHTS")]
    quantize: Option<Quantize>,
    /// Threads; 0 takes one a core [default: 0].
    #[arg(long, env = "FORKPOINT_THREADS", value_name = "N")]
    threads: Option<usize>,
    /// Tokens that a session may hold; 0 takes the model's own [default: 0].
    #[arg(long, env = "FORKPOINT_CONTEXT", value_name = "TOKENS")]
    context: Option<usize>,
}

#[derive(Debug, Args)]
pub(super) struct ServeArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The folder for what outlives the server: policies' stores and versions, and the journal; "memory" keeps
    /// nothing [default: a folder for these plugins in ~/.local/state/forkpoint].
    #[arg(long, env = "FORKPOINT_STATE", value_name = "DIR")]
    state: Option<PathBuf>,
    /// Where to listen [default: 127.0.0.1:8000].
    #[arg(long, env = "FORKPOINT_ADDR", value_name = "HOST:PORT")]
    addr: Option<SocketAddr>,
    /// The address to listen on, with the port as it is.
    #[arg(long, env = "FORKPOINT_HOST", value_name = "IP", conflicts_with = "addr")]
    host: Option<IpAddr>,
    /// The port to listen on, with the address as it is; 0 takes a free one.
    #[arg(long, env = "FORKPOINT_PORT", value_name = "PORT", conflicts_with = "addr")]
    port: Option<u16>,
    /// How the log is written, to standard error. FORKPOINT_LOG filters it, such as "debug" or "policy=debug".
    #[arg(long, env = "FORKPOINT_LOG_FORMAT", value_name = "FORMAT", default_value = "human")]
    log_format: LogFormat,
}

impl ServeArgs {
    pub(super) fn run(self) -> Result<()> {
        start_log(self.log_format, "info")?;
        let config = self.into_config()?;
        on_runtime(serve::run(config))
    }

    /// The configuration file with these flags over it.
    pub(super) fn into_config(self) -> Result<Config> {
        let mut config = self.model.into_config()?;
        config.state.dir = self.state.or(config.state.dir);
        let addr = self.addr.unwrap_or(config.server.addr);
        config.server.addr =
            SocketAddr::new(self.host.unwrap_or(addr.ip()), self.port.unwrap_or(addr.port()));
        Ok(config)
    }
}

impl ModelArgs {
    /// The configuration file with these flags over it.
    pub(super) fn into_config(self) -> Result<Config> {
        let mut config = match &self.config {
            Some(path) => Config::load(path)?,
            None if Path::new(DEFAULT_CONFIG).exists() => Config::load(Path::new(DEFAULT_CONFIG))?,
            None => Config::default(),
        };
        let model = &mut config.model;
        model.source = self.model.unwrap_or_else(|| std::mem::take(&mut model.source));
        model.kv_memory = self.kv_memory.unwrap_or(model.kv_memory);
        model.kv_precision = self.kv_precision.unwrap_or(model.kv_precision);
        model.quantize = self.quantize.or(model.quantize);
        model.threads = self.threads.unwrap_or(model.threads);
        model.context = self.context.unwrap_or(model.context);
        config.plugins.dir = self.plugins.unwrap_or(config.plugins.dir);
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::{Cli, Command};
    use super::*;

    fn serve_args(args: &[&str]) -> ServeArgs {
        let line = ["forkpoint", "serve"].iter().chain(args);
        match Cli::try_parse_from(line).unwrap().command {
            Command::Serve(args) => *args,
            other => panic!("not serve: {other:?}"),
        }
    }

    #[test]
    fn flags_win_over_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.toml");
        std::fs::write(&path, "[server]\naddr = '127.0.0.2:1'\n[model]\nthreads = 3\nsource = 'a'\n")
            .unwrap();
        let path = path.to_str().unwrap();
        let config =
            serve_args(&["--config", path, "--port", "9", "--kv-memory", "2GiB"]).into_config().unwrap();
        assert_eq!(config.server.addr, SocketAddr::from(([127, 0, 0, 2], 9)));
        assert_eq!((config.model.threads, config.model.source.as_str()), (3, "a"));
        assert_eq!(config.model.kv_memory, Bytes(2 << 30));
    }

    #[test]
    fn a_named_file_that_is_missing_is_an_error() {
        let error = serve_args(&["--config", "no/such.toml"]).into_config().unwrap_err();
        assert!(error.to_string().contains("no/such.toml"), "{error}");
    }
}
