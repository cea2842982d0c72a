//! The HTTP server: what it holds, which routes it has, how it starts and stops.

mod body;
mod catalog;
mod chat;
mod completions;
mod decisions;
mod guard;
mod journal;
mod keys;
mod lifecycle;
mod listen;
mod metrics;
mod systemone;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use axum::Router;
use axum::extract::MatchedPath;
use axum::http::{Method, Uri};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::Response;
use axum::routing::{get, post, put};
use forkpoint_engine::{Engine, EngineError, Options, Sampling, Session, Tool};
use indexmap::IndexMap;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tower_http::decompression::RequestDecompressionLayer;

use crate::config::{Config, ConfigError, JournalConfig, ModelConfig, ServerConfig};
use crate::dispatch::Upstreams;
use crate::folders::cache_folder;
use crate::journal::{Journal, JournalOptions};
use crate::models::{Located, Source, Store};
use crate::policy::{self, Limits, Policies, PolicyOptions, Signers};
use crate::traces::{Phase, Traces};
use crate::wire::{ApiError, Dialect, Kind};

pub(crate) use guard::ErrorCode;
pub use guard::RequestContext;
pub use listen::Server;
pub use metrics::Metrics;

/// The name that TypeSafe's clients ask for when they name no model.
const TYPESAFE_ALIAS: &str = "jev-latest";

/// The policy that answers where clients name `auto` or no model, if it is served.
const AUTO: &str = "auto";

/// Every route: method, path, and what it is for.
pub const ROUTES: &[(&str, &str, &str)] = &[
    ("POST", "/v1/chat/completions", "OpenAI chat completions; a policy's name as the model routes"),
    ("POST", "/v1/completions", "OpenAI completions"),
    ("POST", "/v1/systemone", "TypeSafe typed questions"),
    ("POST", "/v1/decisions", "OpenAI decisions"),
    ("GET", "/v1/models", "models, routes and policies"),
    ("GET", "/v1/models/{name}", "one of them"),
    ("GET", "/v1/policies", "policies and their state"),
    ("GET", "/v1/policies/{name}", "one of them"),
    ("PUT", "/v1/policies/{name}", "upload a component (operators)"),
    ("DELETE", "/v1/policies/{name}", "remove one (operators)"),
    ("PUT", "/v1/policies/{name}/manifest", "upload its manifest (operators)"),
    ("POST", "/v1/policies/{name}/{action}", "disable, enable, promote or rollback (operators)"),
    ("GET", "/v1/journal", "what was decided, as a stream (operators)"),
    ("GET", "/health", "whether the server takes requests"),
    ("GET", "/metrics", "Prometheus metrics"),
];

/// What every request may use.
pub struct App {
    /// The model and its sessions.
    pub engine: Engine,
    /// The policies.
    pub policies: Arc<Policies>,
    /// Where policies may forward to.
    pub upstreams: Upstreams,
    /// The operator's tools.
    pub tools: Vec<Tool>,
    /// How a reply is sampled where the client leaves it open.
    pub sampling: Sampling,
    /// What is counted.
    pub metrics: Metrics,
    /// What was decided; none where it is switched off.
    pub journal: Option<Arc<Journal>>,
    /// Spans of requests; none where nobody collects them.
    pub traces: Option<Arc<Traces>>,
    /// The model's name for clients, then its other names.
    names: Vec<String>,
    routes: IndexMap<String, Vec<String>>,
    keys: keys::Keys,
    server: ServerConfig,
    in_flight: Arc<Semaphore>,
    started: SystemTime,
    stopping: tokio_util::sync::CancellationToken,
}

/// What a model name stands for.
pub enum Target {
    /// The loaded model.
    Model,
    /// Policies, asked in order.
    Chain(Vec<String>),
}

impl App {
    /// The name of the loaded model.
    #[must_use]
    pub fn model(&self) -> &str {
        &self.names[0]
    }

    /// Whether the loaded model goes by this name.
    #[must_use]
    pub fn is_model(&self, name: &str) -> bool {
        self.names.iter().any(|known| known == name)
    }

    /// What a client's model name stands for: the loaded model, a route of the configuration, a policy, or a name that
    /// a manifest binds, in this order. No name stands for `auto` where that is served, else for the loaded model.
    ///
    /// # Errors
    /// [`Kind::UnknownModel`] names what is served, or says why a policy of that name is not.
    pub fn target(&self, name: Option<&str>) -> Result<Target, ApiError> {
        let Some(name) = name else {
            return Ok(self.target(Some(AUTO)).unwrap_or(Target::Model));
        };
        if self.is_model(name) {
            return Ok(Target::Model);
        }
        if let Some(chain) = self.routes.get(name) {
            return Ok(Target::Chain(chain.clone()));
        }
        if self.policies.has(name) {
            return Ok(Target::Chain(vec![name.to_owned()]));
        }
        if let Some(policy) = self.policies.routed(name) {
            return Ok(Target::Chain(vec![policy]));
        }
        Err(self.unknown_model(name))
    }

    /// Checks that a name stands for the loaded model itself, on routes where no policy is asked.
    ///
    /// # Errors
    /// [`Kind::UnknownModel`], or [`Kind::Unsupported`] for the name of a policy.
    pub fn plain_model(&self, name: Option<&str>) -> Result<(), ApiError> {
        match name.map(|name| self.target(Some(name))) {
            None | Some(Ok(Target::Model)) => Ok(()),
            Some(Err(error)) => Err(error),
            Some(Ok(Target::Chain(_))) => {
                let message = format!(
                    "policies answer /v1/chat/completions; this route takes the model {:?}",
                    self.model()
                );
                Err(ApiError::field("model", message).with_kind(Kind::UnknownModel))
            }
        }
    }

    /// Opens a session, and notes of the request when and how. Dropped on the way, it ends there.
    async fn open(
        &self,
        context: &RequestContext,
        open: impl Future<Output = Result<Session, EngineError>>,
    ) -> Result<Session, EngineError> {
        context.time(|timeline| timeline.opened = Some((Phase::begin(), None)));
        let ends = Ends(context);
        let session = open.await;
        let opened = match &session {
            Ok(session) => Ok(session.usage()),
            Err(error) => Err(ApiError::from(error).code()),
        };
        if let Some(line) = &mut context.record.note().journal {
            line.session = match &session {
                Ok(session) => session.usage().into(),
                Err(error) => error.into(),
            };
        }
        context.time(|timeline| {
            if let Some((_, how)) = &mut timeline.opened {
                *how = Some(opened);
            }
        });
        drop(ends);
        session
    }

    /// Names the model's state for `system_fingerprint`.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        // 64 bits tell checkpoints apart; OpenAI's are shorter still.
        format!("fp_{:016x}", self.engine.model().fingerprint as u64)
    }
}

/// Ends the opening of a request's session in its timeline, also where that is given up.
struct Ends<'a>(&'a RequestContext);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.time(|timeline| {
            if let Some((phase, _)) = &mut timeline.opened {
                phase.end();
            }
        });
    }
}

/// Why a server did not start. Each message says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The port is taken or the address is not this machine's.
    #[error("cannot listen on {addr}: {error}; --addr or --port names another place")]
    Listen {
        /// Where.
        addr: SocketAddr,
        /// The system's reason.
        error: std::io::Error,
    },
    /// The configuration parses, but cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The model could not be had.
    #[error(transparent)]
    Model(#[from] crate::models::ModelError),
    /// The model could not be loaded.
    #[error("cannot serve {path}: {error}")]
    Engine {
        /// The checkpoint.
        path: std::path::PathBuf,
        /// The engine's reason.
        error: Box<forkpoint_engine::StartError>,
    },
    /// The journal cannot be written.
    #[error(
        "cannot write the journal in {dir}: {error}; [journal] dir names another place, enabled = false does without"
    )]
    Journal {
        /// Its folder.
        dir: std::path::PathBuf,
        /// The system's reason.
        error: std::io::Error,
    },
    /// The policy host did not start.
    #[error(transparent)]
    Policies(#[from] policy::StartError),
    /// A task that loads did not come to its end.
    #[error("loading broke off: {0}")]
    Broken(String),
}

impl App {
    /// Loads the model and starts the policies, as the configuration says.
    ///
    /// # Errors
    /// What is missing, and what to do about it.
    pub async fn load(config: &Config) -> Result<Arc<Self>, ServeError> {
        let keys = keys::Keys::read(&config.server)?;
        let upstreams = Upstreams::new(&config.upstreams)?;
        let tools = config.operator_tools()?;
        let state = config.state.folder(&config.plugins.dir);
        if !config.plugins.allow_missing {
            config.check_routes(&policy::there(&config.plugins.dir))?;
        }
        let (located, engine) = load_model(&config.model).await?;

        let mut sampling = engine.model().sampling.clone();
        if let Some((temperature, top_p)) = located.recommended {
            (sampling.temperature, sampling.top_p) = (temperature, top_p);
        }
        let names = model_names(&located, &engine, &config.model.aliases);
        if let Some(name) = config.routes.keys().find(|name| names.contains(name)) {
            let message = "the loaded model has this name already; requests would never reach the policies";
            return Err(ConfigError::value(format!("routes.{name}"), message).into());
        }
        if let Some(warning) = config.few_places() {
            tracing::warn!("{warning}");
        }
        let journal = open_journal(&config.journal, state.as_deref())?;
        let traces = Traces::start(&config.traces)?;
        let policies = Policies::start(PolicyOptions {
            state,
            journal: journal.clone(),
            traces: traces.clone(),
            cache: Some(config.plugins.cache.clone().unwrap_or_else(|| cache_folder().join("policies"))),
            rules: config.policies.clone(),
            defaults: config.plugins.defaults.clone(),
            ceiling: Limits::CEILING.with(&config.plugins.ceiling),
            concurrency: config.places(),
            warm_instances: config.plugins.warm_instances,
            ready_instances: config.plugins.ready_instances,
            queue_wait: Duration::from_millis(config.plugins.queue_wait_ms),
            max_file: config.plugins.max_file.0,
            signers: Signers {
                keys: config.plugins.signers.clone(),
                required: config.plugins.require_signature,
            },
            upstreams: config.upstreams.keys().cloned().collect(),
            models: names.iter().cloned().collect(),
            tools: tools.iter().map(|tool| tool.name.clone()).collect::<BTreeSet<_>>(),
            engine: config.plugins.probes.then(|| engine.clone()),
            probe_cache: Some(config.plugins.cache.clone().unwrap_or_else(cache_folder).join("probes")),
            ..PolicyOptions::new(&config.plugins.dir)
        })
        .await?;
        Ok(Arc::new(Self {
            engine,
            policies,
            upstreams,
            tools,
            sampling,
            metrics: Metrics::default(),
            journal,
            traces,
            names,
            routes: config.routes.clone(),
            keys,
            in_flight: Arc::new(Semaphore::new(config.server.max_in_flight)),
            server: config.server.clone(),
            started: SystemTime::now(),
            stopping: tokio_util::sync::CancellationToken::new(),
        }))
    }

    /// The routes over this state.
    pub fn router(self: &Arc<Self>) -> Router {
        Router::new()
            .route("/v1/chat/completions", post(chat::answer))
            .route("/v1/completions", post(completions::answer))
            .route("/v1/systemone", post(systemone::answer))
            .route("/v1/decisions", post(decisions::answer))
            .route("/v1/models", get(catalog::models))
            .route("/v1/models/{*name}", get(catalog::model))
            .route("/v1/policies", get(catalog::policies))
            .route(
                "/v1/policies/{name}",
                get(catalog::policy).put(lifecycle::upload).delete(lifecycle::remove),
            )
            .route("/v1/policies/{name}/manifest", put(lifecycle::describe))
            .route("/v1/policies/{name}/{action}", post(lifecycle::act))
            .route("/v1/journal", get(journal::stream))
            .route("/health", get(catalog::health))
            .route("/metrics", get(catalog::metrics))
            .fallback(no_route)
            .method_not_allowed_fallback(no_method)
            .layer(RequestDecompressionLayer::new().pass_through_unaccepted(true))
            .layer(from_fn(guard::no_panic))
            .layer(from_fn_with_state(self.clone(), guard::guard))
            .with_state(self.clone())
    }
}

fn open_journal(config: &JournalConfig, state: Option<&Path>) -> Result<Option<Arc<Journal>>, ServeError> {
    if !config.enabled {
        return Ok(None);
    }
    let dir = config.dir.clone().or_else(|| state.map(|state| state.join("journal")));
    let (prompts, max_file, max_total) = (config.prompts, config.max_file, config.max_total);
    let options = JournalOptions { dir: dir.clone(), prompts, max_file, max_total };
    let failed = |error| ServeError::Journal { dir: dir.unwrap_or_default(), error };
    Journal::open(&options).map(Some).map_err(failed)
}

/// Finds or fetches a model and starts an engine on it.
///
/// # Errors
/// When it cannot be had or loaded.
pub(crate) async fn load_model(model: &ModelConfig) -> Result<(Located, Engine), ServeError> {
    let source = model.source.clone();
    let options = Options {
        threads: model.threads,
        kv_memory: model.kv_memory.0,
        kv_precision: model.kv_precision,
        quantize: model.quantize,
        context: model.context,
        ..Options::default()
    };
    // Fetching and loading block for seconds.
    let loaded = tokio::task::spawn_blocking(move || {
        let located = Source::parse(&source)?.locate(&Store::from_env())?;
        tracing::info!(path = %located.path.display(), "loading the model");
        let engine = Engine::start(&located.path, &options)
            .map_err(|error| ServeError::Engine { path: located.path.clone(), error: Box::new(error) })?;
        Ok((located, engine))
    });
    loaded.await.map_err(|error| ServeError::Broken(error.to_string()))?
}

/// The id that clients use, then every other name of the same model.
fn model_names(located: &Located, engine: &Engine, aliases: &[String]) -> Vec<String> {
    let mut names = vec![located.id.clone()];
    let file = located.path.file_name().map(|name| name.to_string_lossy().into_owned());
    let stem = located.path.file_stem().map(|name| name.to_string_lossy().into_owned());
    let others = aliases.iter().cloned().chain(file).chain(stem).chain([engine.model().name.clone()]);
    for name in others {
        if !name.is_empty() && !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

async fn no_route(uri: Uri) -> Response {
    let there: Vec<String> = ROUTES.iter().map(|(method, path, _)| format!("{method} {path}")).collect();
    let message = format!("no route {}; there are {}", uri.path(), there.join(", "));
    ApiError::new(Kind::NotFound, message).into_response(Dialect::of(uri.path()))
}

async fn no_method(matched: Option<MatchedPath>, method: Method, uri: Uri) -> Response {
    let pattern = matched.as_ref().map_or(uri.path(), MatchedPath::as_str).replace("{*", "{");
    let takes = ROUTES.iter().filter(|(_, path, _)| *path == pattern).map(|(method, ..)| *method);
    let takes: Vec<&str> = takes.collect();
    let message = format!("{} takes {}, got {method}", uri.path(), takes.join(" or "));
    ApiError::new(Kind::Method, message).into_response(Dialect::of(uri.path()))
}

/// Seconds since 1970.
pub(crate) fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Serves until SIGINT or SIGTERM, then drains and stops.
///
/// # Errors
/// When the server does not start.
pub async fn run(config: Config) -> anyhow::Result<()> {
    // Bound before the model is loaded: a port that is taken is told at once.
    let listener = bind(config.server.addr).await?;
    let server = Server::start(&config, listener).await?;
    announce(&server, &config.plugins.dir);
    wait_for_signal().await.context("cannot wait for signals")?;
    tracing::info!("stopping: requests in flight have {} s", config.server.drain_timeout().as_secs());
    server.stop().await;
    tracing::info!("stopped");
    Ok(())
}

/// Takes an address.
///
/// # Errors
/// [`ServeError::Listen`].
pub async fn bind(addr: SocketAddr) -> Result<TcpListener, ServeError> {
    TcpListener::bind(addr).await.map_err(|error| ServeError::Listen { addr, error })
}

/// Tells the operator what is served and how to try it.
fn announce(server: &Server, plugins: &Path) {
    let app = server.app();
    let model = app.engine.model();
    let (kv, addr) = (app.engine.counters().pages_total, server.addr());
    eprintln!();
    eprintln!(
        "model     {} ({}, {} million parameters)",
        app.model(),
        model.architecture,
        model.parameters / 1_000_000
    );
    eprintln!("device    {}", model.device);
    eprintln!("context   {} tokens a session, {kv} pages of 16", model.context);
    if let Some(reason) = &model.decide_unsupported {
        eprintln!("decide    not on this model: {reason}");
    }
    let policies = app.policies.list();
    if policies.is_empty() {
        eprintln!("policies  none in {}; drop a .wasm there", plugins.display());
    }
    for (index, policy) in policies.iter().enumerate() {
        let head = if index == 0 { "policies" } else { "" };
        eprintln!("{head:9} {}", catalog::describe_policy(policy));
    }
    for (index, (name, chain)) in app.routes.iter().enumerate() {
        let head = if index == 0 { "routes" } else { "" };
        let there = |policy: &String| {
            if app.policies.get(policy).is_some() { policy.clone() } else { format!("{policy} NOT THERE") }
        };
        eprintln!("{head:9} {name}: {}", chain.iter().map(there).collect::<Vec<_>>().join(", "));
    }
    eprintln!("serving   http://{addr}");
    let served = policies.iter().find(|policy| catalog::is_served(policy));
    let name = served.map_or(app.model(), |policy| policy.name.as_str());
    let name = if app.policies.has(AUTO) { AUTO } else { name };
    eprintln!();
    eprintln!(
        "try       curl http://{addr}/v1/chat/completions -H 'content-type: application/json' \
         -d '{{\"model\": \"{name}\", \"max_tokens\": 100, \"messages\": [{{\"role\": \"user\", \"content\": \"Explain in one sentence what a mutex is.\"}}]}}'"
    );
    eprintln!();
}

#[cfg(unix)]
async fn wait_for_signal() -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    Ok(())
}

#[cfg(not(unix))]
async fn wait_for_signal() -> std::io::Result<()> {
    tokio::signal::ctrl_c().await
}
