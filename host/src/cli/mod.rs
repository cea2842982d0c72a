//! The command line.

use std::io::{IsTerminal, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand, ValueEnum};
use forkpoint_engine::{KvPrecision, Quantize};
use tracing_subscriber::EnvFilter;

use crate::bench::{Against, Measure, Plan};
use crate::config::{Bytes, Config};
use crate::models::{BUILT_IN, Source, Store};
use crate::{bench, guest_tools, serve};

/// Where the configuration lies when none is named.
const DEFAULT_CONFIG: &str = "forkpoint.toml";

/// An LLM inference server that runs its users' routing policies, as WebAssembly, where the KV cache is warm.
#[derive(Debug, Parser)]
#[command(name = "forkpoint", version, about, long_about = None, after_help = "\
Examples:
  forkpoint serve                            serve the default model and the policies in plugins/
  forkpoint serve --model ./model.gguf       serve a file of your own
  forkpoint pull smollm2-135m                fetch a model, for a machine that will be offline
  forkpoint bench                            measure how fast this machine serves it
  forkpoint policy componentize in.wasm out.wasm")]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a model and policies over HTTP.
    #[command(after_help = "\
Examples:
  forkpoint serve
  forkpoint serve --model hf:owner/repo/model.gguf --addr 0.0.0.0:8080
  forkpoint serve --plugins ./policies --config ./forkpoint.toml
  FORKPOINT_KV_MEMORY=4GiB forkpoint serve --threads 8

Flags win over the environment, the environment over forkpoint.toml.")]
    Serve(Box<ServeArgs>),
    /// Measure how fast this machine serves a model, beside other servers if they are named.
    #[command(after_help = "\
Examples:
  forkpoint bench                                    every measure; a few minutes
  forkpoint bench --quick                            small sizes, to see that it works
  forkpoint bench --only decide,sessions --json -    two groups, as JSON
  forkpoint bench --against llama:q4_0=http://127.0.0.1:8080 --against llama:q4_1=http://127.0.0.1:8081
  forkpoint bench --model ./qwen3 --against vllm=http://127.0.0.1:8000

Peers must run already, and serve the same weights. docs/bench.md says what each measure is.")]
    Bench(Box<BenchArgs>),
    /// Fetch a built-in model or one from a hub, and say where it lies.
    #[command(after_help = "Example:\n  forkpoint pull smollm2-135m")]
    Pull {
        /// A built-in name, or hf:owner/repo/file.gguf.
        name: String,
    },
    /// Tools for authors of policies.
    #[command(subcommand)]
    Policy(PolicyCommand),
}

/// What is loaded and what it may use, the same for every command that serves.
#[derive(Debug, Args)]
struct ModelArgs {
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
    kv_memory: Option<Bytes>,
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
struct ServeArgs {
    #[command(flatten)]
    model: ModelArgs,
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

#[derive(Debug, Args)]
struct BenchArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// What to measure [default: all].
    #[arg(long, value_name = "MEASURE", value_delimiter = ',')]
    only: Vec<Measure>,
    /// A running peer: llama=URL for llama.cpp's llama-server, vllm=URL for vLLM; with a label where there are
    /// several, llama:q4_0=URL. May be repeated.
    #[arg(long, value_name = "PEER=URL")]
    against: Vec<Against>,
    /// How often each side runs.
    #[arg(long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u16).range(1..))]
    repeat: u16,
    /// Tokens of the states that questions are asked about.
    #[arg(long, value_name = "TOKENS", default_value = "4100", value_parser = clap::value_parser!(u32).range(64..))]
    state_tokens: u32,
    /// Tokens of the cold prompts.
    #[arg(
        long,
        value_name = "TOKENS",
        value_delimiter = ',',
        default_value = "512,2048,4096,8192",
        value_parser = clap::value_parser!(u32).range(16..)
    )]
    prompts: Vec<u32>,
    /// Tokens before the replies whose speed is measured.
    #[arg(
        long,
        value_name = "TOKENS",
        value_delimiter = ',',
        default_value = "128,2048,8192",
        value_parser = clap::value_parser!(u32).range(16..)
    )]
    depths: Vec<u32>,
    /// How many questions a call asks.
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        default_value = "1,4,16",
        value_parser = clap::value_parser!(u16).range(1..=64)
    )]
    questions: Vec<u16>,
    /// How many clients ask at once.
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        default_value = "1,8,32",
        value_parser = clap::value_parser!(u16).range(1..=256)
    )]
    clients: Vec<u16>,
    /// Small sizes and one repeat, to see that it works: its figures say nothing.
    #[arg(long)]
    quick: bool,
    /// Where to write the results as JSON; - writes standard output, in place of the table.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// Lines for people.
    Human,
    /// One JSON object a line.
    Json,
}

#[derive(Debug, Subcommand)]
enum PolicyCommand {
    /// Make a component of a core module, such as clang and TinyGo build.
    #[command(after_help = "\
Examples:
  forkpoint policy componentize gate.core.wasm plugins/gate.wasm
  forkpoint policy componentize gate.core.wasm plugins/gate.wasm --adapt    built for wasm32-wasip1
  forkpoint policy componentize - - < in.wasm > out.wasm")]
    Componentize {
        /// The core module; - reads standard input.
        input: PathBuf,
        /// Where the component goes; - writes standard output.
        output: PathBuf,
        /// Link the adapter from WASI preview 1.
        #[arg(long)]
        adapt: bool,
        /// The contract, for a module that does not carry it [default: the one built in].
        #[arg(long, value_name = "DIR")]
        wit: Option<PathBuf>,
    },
    /// Write bindings of the contract for a language.
    #[command(subcommand)]
    Bindgen(BindgenCommand),
}

#[derive(Debug, Subcommand)]
enum BindgenCommand {
    /// For C: policy.h, policy.c and an object to link.
    #[command(after_help = "Example:\n  forkpoint policy bindgen c --wit wit build/bindings")]
    C {
        /// The contract.
        #[arg(long, value_name = "DIR")]
        wit: PathBuf,
        /// The folder to write into.
        out_dir: PathBuf,
    },
}

impl Cli {
    /// Does what was asked.
    ///
    /// # Errors
    /// What stopped it, as one sentence with its causes.
    pub fn run(self) -> Result<()> {
        match self.command {
            Command::Serve(args) => args.run(),
            Command::Bench(args) => args.run(),
            Command::Pull { name } => pull(&name),
            Command::Policy(PolicyCommand::Componentize { input, output, adapt, wit }) => {
                let core = read_file(&input)?;
                let component = guest_tools::componentize(&core, adapt, wit.as_deref())
                    .with_context(|| format!("cannot make a component of {}", input.display()))?;
                write_file(&output, &component)
            }
            Command::Policy(PolicyCommand::Bindgen(BindgenCommand::C { wit, out_dir })) => {
                let written = guest_tools::bindgen_c(&wit, &out_dir)?;
                for path in written {
                    eprintln!("wrote {}", path.display());
                }
                Ok(())
            }
        }
    }
}

impl ServeArgs {
    fn run(self) -> Result<()> {
        start_log(self.log_format, "info")?;
        let config = self.into_config()?;
        on_runtime(serve::run(config))
    }

    /// The configuration file with these flags over it.
    fn into_config(self) -> Result<Config> {
        let mut config = self.model.into_config()?;
        let addr = self.addr.unwrap_or(config.server.addr);
        config.server.addr =
            SocketAddr::new(self.host.unwrap_or(addr.ip()), self.port.unwrap_or(addr.port()));
        Ok(config)
    }
}

impl ModelArgs {
    /// The configuration file with these flags over it.
    fn into_config(self) -> Result<Config> {
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

impl BenchArgs {
    fn run(self) -> Result<()> {
        start_log(LogFormat::Human, "warn")?;
        let kv_memory_given = self.model.kv_memory.is_some();
        let plan = Plan {
            config: self.model.into_config()?,
            kv_memory_given,
            only: self.only,
            against: self.against,
            repeats: self.repeat.into(),
            state_tokens: self.state_tokens as usize,
            prompts: self.prompts.into_iter().map(|tokens| tokens as usize).collect(),
            depths: self.depths.into_iter().map(|tokens| tokens as usize).collect(),
            questions: self.questions.into_iter().map(usize::from).collect(),
            clients: self.clients.into_iter().map(usize::from).collect(),
            quick: self.quick,
            json: self.json,
        };
        on_runtime(async { Ok(bench::run(plan).await?) })
    }
}

fn on_runtime(work: impl Future<Output = Result<()>>) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("forkpoint-http")
        .build()
        .context("cannot start the runtime")?;
    let done = runtime.block_on(work);
    // Threads that block, such as a compilation that no request waits for, must not hold up the exit.
    runtime.shutdown_background();
    done
}

fn pull(name: &str) -> Result<()> {
    let source = Source::parse(name)?;
    if let Source::Path(path) = &source {
        bail!("{} is a file already; built-in models: {}", path.display(), built_in_names());
    }
    let located = source.locate(&Store::from_env())?;
    writeln!(std::io::stdout(), "{}", located.path.display()).context("cannot write to standard output")
}

fn built_in_names() -> String {
    BUILT_IN.iter().map(|model| model.name).collect::<Vec<_>>().join(", ")
}

/// `usual` is what is logged where FORKPOINT_LOG says nothing.
fn start_log(format: LogFormat, usual: &str) -> Result<()> {
    let filter = match std::env::var("FORKPOINT_LOG") {
        Ok(text) if !text.is_empty() => EnvFilter::try_new(&text)
            .with_context(|| format!("FORKPOINT_LOG: {text:?} is not a log filter"))?,
        _ => EnvFilter::new(usual),
    };
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = match format {
        LogFormat::Human => {
            subscriber.with_target(false).with_ansi(std::io::stderr().is_terminal()).try_init()
        }
        LogFormat::Json => subscriber.json().flatten_event(true).try_init(),
    };
    started.map_err(|error| anyhow::anyhow!("cannot start the log: {error}"))
}

fn read_file(path: &Path) -> Result<Vec<u8>> {
    if path == Path::new("-") {
        let mut bytes = Vec::new();
        std::io::stdin().lock().read_to_end(&mut bytes).context("cannot read standard input")?;
        return Ok(bytes);
    }
    std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Writes beside the target and renames, so that a watcher never sees half a file.
fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    if path == Path::new("-") {
        return std::io::stdout().lock().write_all(bytes).context("cannot write to standard output");
    }
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let failed = || format!("cannot write {}", path.display());
    let mut file = tempfile::Builder::new().prefix(".forkpoint-").tempfile_in(folder).with_context(failed)?;
    file.write_all(bytes).with_context(failed)?;
    let kept = file.persist(path).with_context(failed)?;
    share(&kept).with_context(failed)
}

/// Gives a file that was made for its owner alone the permissions that files usually have.
#[cfg(unix)]
fn share(file: &std::fs::File) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    file.set_permissions(std::fs::Permissions::from_mode(0o644))
}

#[cfg(not(unix))]
fn share(_file: &std::fs::File) -> std::io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn serve_args(args: &[&str]) -> ServeArgs {
        let line = ["forkpoint", "serve"].iter().chain(args);
        match Cli::try_parse_from(line).unwrap().command {
            Command::Serve(args) => *args,
            other => panic!("not serve: {other:?}"),
        }
    }

    #[test]
    fn the_definition_holds_together() {
        Cli::command().debug_assert();
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

    #[test]
    fn a_component_is_written_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.wasm");
        for bytes in [&b"one"[..], b"two"] {
            write_file(&path, bytes).unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), bytes);
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
