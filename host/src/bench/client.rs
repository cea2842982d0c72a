//! The client that every side is called with: the same code, the same clock.

use std::time::{Duration, Instant};

use futures::StreamExt;
use reqwest::Response;
use serde_json::Value;

use super::error::BenchError;

/// The longest that one call may take: a slow peer's prefill of a long prompt takes minutes.
const LONGEST: Duration = Duration::from_secs(1800);

/// Characters of an answer that an error shows.
const SHOWN: usize = 300;

/// Calls one server.
#[derive(Clone)]
pub(super) struct Client {
    http: reqwest::Client,
    /// The side's name in the table.
    pub(super) side: String,
    /// `http://host:port`, without a slash at its end.
    base: String,
}

/// An answer and how long it took.
pub(super) struct Timed {
    /// From before the request is sent until the last byte of the answer is here.
    pub(super) seconds: f64,
    pub(super) body: Value,
}

/// One event of a stream.
pub(super) struct Arrival {
    pub(super) at: Instant,
    pub(super) data: Value,
}

impl Client {
    pub(super) fn new(side: &str, base: &str) -> Result<Self, BenchError> {
        // Another part of the process may have chosen one already, and that one serves as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        // A proxy between a client and a server under test would be measured with it.
        let http = reqwest::Client::builder()
            .no_proxy()
            .timeout(LONGEST)
            .tcp_nodelay(true)
            .build()
            .map_err(|error| BenchError::Unfit(format!("cannot set up a client: {}", root(&error))))?;
        Ok(Self { http, side: side.to_owned(), base: base.trim_end_matches('/').to_owned() })
    }

    /// The answer to a POST of JSON.
    pub(super) async fn post(&self, path: &str, body: &Value) -> Result<Timed, BenchError> {
        let start = Instant::now();
        let bytes = self.send(path, body).await?.bytes().await.map_err(|error| self.broken(path, &error))?;
        let seconds = start.elapsed().as_secs_f64();
        let body = serde_json::from_slice(&bytes)
            .map_err(|error| self.odd(format!("{path} answered with what is no JSON: {error}")))?;
        Ok(Timed { seconds, body })
    }

    /// The events of a stream, each with its time of arrival. Events that arrive in one piece have one time.
    pub(super) async fn stream(&self, path: &str, body: &Value) -> Result<Vec<Arrival>, BenchError> {
        let mut pieces = self.send(path, body).await?.bytes_stream();
        let (mut arrivals, mut line) = (Vec::new(), Vec::new());
        while let Some(piece) = pieces.next().await {
            let piece = piece.map_err(|error| self.broken(path, &error))?;
            let at = Instant::now();
            for &byte in &piece {
                if byte != b'\n' {
                    line.push(byte);
                    continue;
                }
                if let Some(data) = event(&line) {
                    let data = serde_json::from_slice(data)
                        .map_err(|error| self.odd(format!("{path} streamed what is no JSON: {error}")))?;
                    arrivals.push(Arrival { at, data });
                }
                line.clear();
            }
        }
        Ok(arrivals)
    }

    /// The answer to a GET, within seconds.
    ///
    /// # Errors
    /// [`BenchError::Unreachable`] where nobody listens.
    pub(super) async fn get(&self, path: &str) -> Result<Value, BenchError> {
        let request = self.http.get(format!("{}{path}", self.base)).timeout(Duration::from_secs(10));
        let response = request.send().await.map_err(|error| BenchError::Unreachable {
            side: self.side.clone(),
            url: self.base.clone(),
            error: root(&error),
        })?;
        let bytes = self.sound(path, response).await?.bytes().await;
        let bytes = bytes.map_err(|error| self.broken(path, &error))?;
        serde_json::from_slice(&bytes)
            .map_err(|error| self.odd(format!("{path} answered with what is no JSON: {error}")))
    }

    /// An answer that is not what was asked for.
    pub(super) fn odd(&self, what: String) -> BenchError {
        BenchError::Answer { side: self.side.clone(), what }
    }

    async fn send(&self, path: &str, body: &Value) -> Result<Response, BenchError> {
        let request = self.http.post(format!("{}{path}", self.base)).json(body);
        let response = request.send().await.map_err(|error| self.broken(path, &error))?;
        self.sound(path, response).await
    }

    async fn sound(&self, path: &str, response: Response) -> Result<Response, BenchError> {
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status().as_u16();
        let text = response.text().await.unwrap_or_default();
        let body = text.chars().take(SHOWN).collect();
        Err(BenchError::Status { side: self.side.clone(), path: path.to_owned(), status, body })
    }

    fn broken(&self, path: &str, error: &reqwest::Error) -> BenchError {
        BenchError::Call { side: self.side.clone(), path: path.to_owned(), error: root(error) }
    }
}

/// What a line of a stream carries; nothing for other lines and for the end mark.
fn event(line: &[u8]) -> Option<&[u8]> {
    let data = line.strip_prefix(b"data:")?.trim_ascii();
    (data != b"[DONE]").then_some(data)
}

/// The innermost reason: the outer ones only say that something went wrong.
fn root(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::event;

    #[test]
    fn a_line_of_a_stream_is_an_event_or_nothing() {
        assert_eq!(event(b"data: {\"a\": 1}\r"), Some(&b"{\"a\": 1}"[..]));
        assert_eq!(event(b"data:{}"), Some(&b"{}"[..]));
        for other in [&b"data: [DONE]"[..], b"", b": a comment", b"event: x"] {
            assert_eq!(event(other), None);
        }
    }
}
