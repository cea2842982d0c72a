//! Sends a request on to a model server elsewhere, and its answer back as it comes.

use std::collections::BTreeMap;
use std::time::Duration;

use async_stream::stream;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::Response;
use futures::StreamExt;
use reqwest::{Client, Url, redirect};
use serde_json::{Value, json};

use super::delivery::Delivery;
use crate::config::{ConfigError, UpstreamConfig};
use crate::serve::App;
use crate::traces::{Dispatched, Forwarded, Phase, Timeline, new_span_id};
use crate::wire::{ApiError, Kind, sse};

/// How long a connection may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Headers that belong to one connection and are not passed on (RFC 9110, 7.6.1), with those that this server
/// sets itself.
const NOT_PASSED: [&str; 10] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-request-id",
];

/// A model server elsewhere.
#[derive(Debug)]
struct Upstream {
    url: Url,
    model: String,
    timeout: Duration,
    client: Client,
}

/// The upstreams that policies may forward to, by name.
#[derive(Debug, Default)]
pub struct Upstreams(BTreeMap<String, Upstream>);

impl Upstreams {
    /// Sets up a client for each.
    ///
    /// # Errors
    /// When an address, header or key cannot be used.
    pub fn new(configured: &BTreeMap<String, UpstreamConfig>) -> Result<Self, ConfigError> {
        let upstreams = configured
            .iter()
            .map(|(name, config)| Ok((name.clone(), Upstream::new(name, config)?)))
            .collect::<Result<_, ConfigError>>()?;
        Ok(Self(upstreams))
    }
}

impl Upstream {
    fn new(name: &str, config: &UpstreamConfig) -> Result<Self, ConfigError> {
        let wrong =
            |key: &str, message: String| ConfigError::value(format!("upstreams.{name}.{key}"), message);
        let base = config.url.trim_end_matches('/');
        let url = Url::parse(&format!("{base}/chat/completions"))
            .map_err(|error| wrong("url", format!("{:?} is not a URL: {error}", config.url)))?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(wrong("url", format!("must start with http:// or https://, got {:?}", config.url)));
        }
        let mut headers = HeaderMap::new();
        for (header, value) in &config.headers {
            let header = HeaderName::from_bytes(header.as_bytes())
                .map_err(|_| wrong("headers", format!("{header:?} cannot be a header's name")))?;
            let value = HeaderValue::from_str(value)
                .map_err(|_| wrong("headers", format!("the value of {header} cannot stand in a header")))?;
            headers.insert(header, value);
        }
        if let Some(variable) = &config.api_key_env {
            let key = std::env::var(variable).ok().filter(|key| !key.trim().is_empty());
            let Some(key) = key else {
                return Err(wrong("api_key_env", format!("the environment variable {variable} is not set")));
            };
            let mut value = HeaderValue::from_str(&format!("Bearer {}", key.trim())).map_err(|_| {
                wrong("api_key_env", format!("the key in {variable} cannot stand in a header"))
            })?;
            value.set_sensitive(true);
            headers.insert(header::AUTHORIZATION, value);
        }
        // Another part of the process may have chosen one already, and that one serves as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let timeout = Duration::from_millis(config.timeout_ms);
        let client = Client::builder()
            .user_agent(concat!("forkpoint/", env!("CARGO_PKG_VERSION")))
            .default_headers(headers)
            .connect_timeout(CONNECT_TIMEOUT.min(timeout))
            .read_timeout(timeout)
            .redirect(redirect::Policy::none())
            .build()
            .map_err(|error| wrong("url", format!("cannot set up a client: {error}")))?;
        Ok(Self { url, model: config.model.clone(), timeout, client })
    }
}

/// Sends the body to an upstream, with the model's name replaced, and answers with what it answers.
///
/// # Errors
/// [`Kind::Upstream`] when it does not answer, or not usefully.
pub(super) async fn forward(
    app: &App,
    name: &str,
    model: Option<String>,
    body: Value,
    delivery: &Delivery,
) -> Result<Response, ApiError> {
    let Some(upstream) = app.upstreams.0.get(name) else {
        // The policy host lets only configured upstreams through.
        return Err(ApiError::new(Kind::Internal, format!("there is no upstream {name:?}")));
    };
    let sent = send(name, upstream, model, body, delivery).await;
    if sent.is_err() {
        delivery.context.time(Timeline::dispatch_ends);
    }
    match &sent {
        Ok(_) => app.metrics.forwarded(name, "ok"),
        Err(ApiError { kind: Kind::Upstream { code, .. }, .. }) => app.metrics.forwarded(name, code),
        Err(_) => {}
    }
    sent
}

fn failed(status: u16, code: &'static str, message: String) -> ApiError {
    ApiError::new(Kind::Upstream { status, code }, message)
}

async fn send(
    name: &str,
    upstream: &Upstream,
    model: Option<String>,
    mut body: Value,
    delivery: &Delivery,
) -> Result<Response, ApiError> {
    let model = model.unwrap_or_else(|| upstream.model.clone());
    delivery.context.record.note().model = Some(format!("{name}/{model}"));
    let span = new_span_id();
    delivery.context.time(|timeline| {
        let forwarded = Forwarded {
            span,
            upstream: name.to_owned(),
            model: model.clone(),
            address: upstream.url.host_str().unwrap_or_default().to_owned(),
            port: upstream.url.port_or_known_default(),
            status: None,
        };
        timeline.dispatched = Some((Phase::begin(), Dispatched::Forward(forwarded)));
    });
    body["model"] = Value::from(model);
    let accept = if delivery.stream { "text/event-stream" } else { "application/json" };
    let request = upstream
        .client
        .post(upstream.url.clone())
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::ACCEPT, accept)
        .header("x-request-id", &delivery.context.id)
        .headers(delivery.context.trace_headers(span))
        .body(body.to_string());
    let late = || {
        let message =
            format!("the upstream {name} did not answer within {} ms", upstream.timeout.as_millis());
        failed(504, "upstream_timeout", message)
    };
    let answer = match tokio::time::timeout(upstream.timeout, request.send()).await {
        Err(_) => return Err(late()),
        Ok(Err(error)) if error.is_timeout() => return Err(late()),
        Ok(Err(error)) => {
            let message = format!("the upstream {name} cannot be reached: {}", cause(&error));
            return Err(failed(502, "upstream_unreachable", message));
        }
        Ok(Ok(answer)) => answer,
    };
    delivery.context.time(|timeline| timeline.answered(answer.status().as_u16()));
    match answer.status() {
        // The client's key is not at fault, so the client must not be told that it is.
        status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => {
            let message = format!("the upstream {name} refuses this server's key ({status})");
            Err(failed(502, "upstream_unauthorized", message))
        }
        status if status.is_redirection() => {
            let message =
                format!("the upstream {name} redirects ({status}); its url has to be the final one");
            Err(failed(502, "upstream_redirect", message))
        }
        _ => Ok(pass_on(name.to_owned(), answer, delivery.clone())),
    }
}

/// The upstream's answer, byte for byte, less what belongs to its connection.
fn pass_on(name: String, answer: reqwest::Response, delivery: Delivery) -> Response {
    let (status, mut headers) = (answer.status(), answer.headers().clone());
    let named: Vec<String> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|name| name.trim().to_ascii_lowercase())
        .collect();
    for header in NOT_PASSED.into_iter().chain(named.iter().map(String::as_str)) {
        headers.remove(header);
    }
    let is_stream = headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .is_some_and(|media| media.starts_with("text/event-stream"));
    let deadline = delivery.context.deadline;
    let mut parts = answer.bytes_stream();
    let body = Body::from_stream(stream! {
        loop {
            let error = match tokio::time::timeout_at(deadline.into(), parts.next()).await {
                Ok(None) => {
                    delivery.context.time(Timeline::dispatch_ends);
                    return;
                }
                Ok(Some(Ok(part))) => {
                    yield Ok(part);
                    continue;
                }
                Ok(Some(Err(error))) => {
                    failed(502, "upstream_broken_off", format!("the upstream {name} broke off: {}", cause(&error)))
                }
                Err(_) => failed(504, "upstream_timeout", format!("the upstream {name} took too long")),
            };
            delivery.context.record.note().error = Some(error.code());
            delivery.context.time(Timeline::dispatch_ends);
            if is_stream {
                yield Ok(sse::event(&json!({ "error": error.to_openai() })));
                yield Ok(sse::DONE);
            } else {
                // Half a JSON body must not look whole: the connection is cut.
                yield Err(std::io::Error::other(error));
            }
            return;
        }
    });
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

/// The innermost cause, which is what an operator can act on: "connection refused" and not "error sending".
fn cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(url: &str) -> UpstreamConfig {
        UpstreamConfig {
            url: url.into(),
            model: "m".into(),
            api_key_env: None,
            timeout_ms: 100,
            headers: BTreeMap::new(),
        }
    }

    #[test]
    fn the_path_is_added_to_the_base() {
        for base in ["http://127.0.0.1:1/v1", "http://127.0.0.1:1/v1/"] {
            let upstream = Upstream::new("u", &config(base)).unwrap();
            assert_eq!(upstream.url.as_str(), "http://127.0.0.1:1/v1/chat/completions");
        }
    }

    #[test]
    fn what_cannot_be_used_is_told_with_its_key() {
        let mut bad_header = config("http://h/v1");
        bad_header.headers.insert("x y".into(), "z".into());
        let mut no_key = config("http://h/v1");
        no_key.api_key_env = Some("FORKPOINT_TEST_NO_SUCH_VARIABLE".into());
        for (config, key) in [
            (config("nowhere"), "upstreams.u.url"),
            (config("ftp://h/v1"), "upstreams.u.url"),
            (bad_header, "upstreams.u.headers"),
            (no_key, "upstreams.u.api_key_env"),
        ] {
            let error = Upstream::new("u", &config).unwrap_err().to_string();
            assert!(error.starts_with(key), "{error}");
        }
    }
}
