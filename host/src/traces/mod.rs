//! OpenTelemetry spans of requests, sent to a collector over OTLP (HTTP, protobuf) apart from the requests.
//!
//! A request only notes times on its way (`Timeline`); its spans are made when it is over and put into a
//! bounded queue. A task sends them on in batches. What finds no room, or no collector, is lost and counted: no
//! request ever waits for a collector, and a stop waits a few seconds at most.

mod context;
mod export;
mod spans;
mod timeline;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use axum::http::HeaderMap;
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SpanData, SpanExporter as _};
use reqwest::{Client, Url, redirect};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub use self::context::TraceContext;
pub(crate) use self::context::{as_they_came, new_span_id};
use self::export::{Counts, export_all};
pub(crate) use self::spans::Outcome;
pub(crate) use self::timeline::{Asked, Dispatched, Forwarded, Phase, Timeline};
use crate::config::{ConfigError, TracesConfig};
use crate::policy::{Share, Step};

/// Spans that may wait to be sent: some thousand requests' worth.
const QUEUE: usize = 8_192;

/// How long a collector may take to answer.
const EXPORT: Duration = Duration::from_secs(10);

/// How long a stop waits for what is still to be sent.
const CLOSE: Duration = Duration::from_secs(3);

/// Where a collector takes traces, below its base.
const PATH: &str = "/v1/traces";

/// What the spans' sender goes by where nobody names it.
const SERVICE: &str = "forkpoint";

/// The environment variables that OpenTelemetry has for the place of a collector: that of traces, then that of
/// all signals, to which the path is added.
const ENDPOINTS: [(&str, bool); 2] =
    [("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", false), ("OTEL_EXPORTER_OTLP_ENDPOINT", true)];

/// The traces of a server.
#[derive(Debug)]
pub struct Traces {
    sample: Share,
    queue: mpsc::Sender<SpanData>,
    counts: Arc<Counts>,
    closing: CancellationToken,
    /// None once it is closed.
    sender: Mutex<Option<JoinHandle<()>>>,
}

impl Traces {
    /// Starts sending to the collector that the configuration names, or else the environment; without either
    /// there are no traces.
    ///
    /// # Errors
    /// When an address or header cannot be used.
    pub fn start(config: &TracesConfig) -> Result<Option<Arc<Self>>, ConfigError> {
        let Some((key, url)) = collector(config)? else { return Ok(None) };
        tracing::info!(collector = %shown(&url), "requests are traced");
        let exporter = exporter(config, &key, &url)?;
        let (queue, waiting) = mpsc::channel(QUEUE);
        let (counts, closing) = (Arc::<Counts>::default(), CancellationToken::new());
        let sender = tokio::spawn(export_all(exporter, waiting, closing.clone(), counts.clone()));
        let sender = Mutex::new(Some(sender));
        Ok(Some(Arc::new(Self { sample: config.sample, queue, counts, closing, sender })))
    }

    /// The place in a trace of a request that came with these headers.
    pub(crate) fn begin(&self, headers: &HeaderMap, came: Instant) -> Arc<TraceContext> {
        let moment = (came, SystemTime::now());
        Arc::new(TraceContext::new(headers, self.sample, moment))
    }

    /// A request is over.
    pub(crate) fn request(&self, context: &TraceContext, outcome: &Outcome<'_>, timeline: &Timeline) {
        if context.is_sampled() {
            self.send(spans::of_request(context, outcome, timeline));
        }
    }

    /// A policy was asked in shadow; `asked` is when the policies of its request were.
    pub(crate) fn shadow(&self, context: &TraceContext, asked: Instant, step: &Step) {
        if context.is_sampled() {
            self.send(spans::of_shadow(context, asked, step));
        }
    }

    /// All spans of a request are sent, or none.
    fn send(&self, spans: Vec<SpanData>) {
        match self.queue.try_reserve_many(spans.len()) {
            Ok(places) => places.zip(spans).for_each(|(place, span)| place.send(span)),
            Err(_) => self.counts.lose(spans.len(), "too many wait to be sent"),
        }
    }

    /// Spans that a collector took.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.counts.sent()
    }

    /// Spans that no collector took.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.counts.lost()
    }

    /// Sends what waits, for a few seconds at most.
    pub async fn close(&self) {
        self.closing.cancel();
        let sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(sender) = sender
            && let Err(error) = sender.await
        {
            tracing::error!(%error, "the sender of traces broke off");
        }
    }
}

/// Where spans are sent, and which key or variable says so.
fn collector(config: &TracesConfig) -> Result<Option<(String, Url)>, ConfigError> {
    if let Some(endpoint) = &config.endpoint {
        let key = "traces.endpoint";
        return Ok(Some((key.to_owned(), collector_url(key, endpoint, true)?)));
    }
    for (variable, is_base) in ENDPOINTS {
        let value = std::env::var_os(variable).filter(|value| !value.is_empty());
        if let Some(value) = value {
            let url = collector_url(variable, &value.to_string_lossy(), is_base)?;
            return Ok(Some((variable.to_owned(), url)));
        }
    }
    Ok(None)
}

/// The URL that a collector takes traces at. `is_base`: the path is added, as OTLP says.
///
/// # Errors
/// When it is none that can be used.
pub(crate) fn collector_url(key: &str, endpoint: &str, is_base: bool) -> Result<Url, ConfigError> {
    let wrong = |message| ConfigError::value(key, message);
    let mut url =
        Url::parse(endpoint).map_err(|error| wrong(format!("{endpoint:?} is not a URL: {error}")))?;
    let path = url.path().trim_end_matches('/').to_owned();
    if is_base && !path.ends_with(PATH) {
        url.set_path(&format!("{path}{PATH}"));
    }
    match url.scheme() {
        "http" | "https" => Ok(url),
        _ => Err(wrong(format!("must start with http:// or https://, got {endpoint:?}"))),
    }
}

/// A URL as the log may show it.
fn shown(url: &Url) -> String {
    let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
    format!("{}://{}{port}{}", url.scheme(), url.host_str().unwrap_or_default(), url.path())
}

fn exporter(config: &TracesConfig, key: &str, url: &Url) -> Result<SpanExporter, ConfigError> {
    let wrong = |error: &dyn std::fmt::Display| ConfigError::value(key, format!("cannot be used: {error}"));
    // Another part of the process may have chosen one already, and that one serves as well.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = Client::builder()
        .connect_timeout(CLOSE)
        .timeout(EXPORT)
        .redirect(redirect::Policy::none())
        .build()
        .map_err(|error| wrong(&error))?;
    // Headers and compression are read from the environment by the exporter itself.
    let exporter = SpanExporter::builder()
        .with_http()
        .with_http_client(client)
        .with_protocol(Protocol::HttpBinary)
        .with_endpoint(url.as_str())
        .with_timeout(EXPORT)
        .build();
    let mut exporter = exporter.map_err(|error| wrong(&error))?;
    exporter.set_resource(&resource(config.service_name.as_deref()));
    Ok(exporter)
}

/// Who sends the spans. The SDK reads OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES.
fn resource(name: Option<&str>) -> Resource {
    use opentelemetry::{Key, KeyValue};

    let detected = Resource::builder().build();
    let known = detected.get(&Key::from_static_str("service.name")).map(|name| name.to_string());
    let known = known.filter(|name| !name.starts_with("unknown_service"));
    let name = name.map(str::to_owned).or(known).unwrap_or_else(|| SERVICE.to_owned());
    let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
    Resource::builder().with_service_name(name).with_attribute(version).build()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collector_is_named_by_its_base_or_its_whole_address() {
        for (endpoint, is_base, url) in [
            ("http://127.0.0.1:4318", true, "http://127.0.0.1:4318/v1/traces"),
            ("http://127.0.0.1:4318/", true, "http://127.0.0.1:4318/v1/traces"),
            ("https://h/otlp", true, "https://h/otlp/v1/traces"),
            ("https://h/v1/traces", true, "https://h/v1/traces"),
            ("https://h/x?key=1", true, "https://h/x/v1/traces?key=1"),
            ("https://h/other/", false, "https://h/other/"),
        ] {
            assert_eq!(collector_url("traces.endpoint", endpoint, is_base).unwrap().as_str(), url);
        }
        for bad in ["", "127.0.0.1:4318", "collector", "grpc://h:4317", "http://"] {
            let error = collector_url("traces.endpoint", bad, true).unwrap_err().to_string();
            assert!(error.starts_with("traces.endpoint: "), "{bad}: {error}");
        }
    }

    #[test]
    fn the_log_shows_no_password() {
        assert_eq!(shown(&Url::parse("http://me:secret@h:1/x?key=secret").unwrap()), "http://h:1/x");
    }
}
