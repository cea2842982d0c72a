//! Reading request bodies: bounded in time and, after decompression, in size, and JSON; and what becomes of
//! one that is answered before its end.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Error;
use axum::body::{Body, BodyDataStream, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use futures::{Stream, StreamExt, stream};
use serde_json::Value;

use super::RequestContext;
use crate::wire::{ApiError, Kind, value};

/// How long a body may take to arrive: a slow sender holds a place among the requests in flight.
const PATIENCE: Duration = Duration::from_secs(30);

/// How much of a body is read after its answer so that its connection may go on; as in Go's `net/http`.
const REST_BYTES: usize = 256 << 10;

/// How long that may take, for the answer waits for it.
const REST_PATIENCE: Duration = Duration::from_millis(200);

/// Reads a body of at most `limit` bytes as a JSON object. Compressed bodies arrive here decompressed.
///
/// # Errors
/// [`Kind::MediaType`], [`Kind::BodyTooLarge`], [`Kind::SlowBody`], [`Kind::Malformed`] or [`Kind::Invalid`].
pub(super) async fn read_json(request: Request, limit: u64) -> Result<Value, ApiError> {
    check_headers(request.headers(), limit)?;
    value::parse(&read_bytes(request, limit, PATIENCE).await?)
}

/// Reads a body of at most `limit` bytes, whatever it is, that arrives within `patience`.
///
/// # Errors
/// [`Kind::BodyTooLarge`], [`Kind::SlowBody`] or [`Kind::Malformed`].
pub(super) async fn read_bytes(
    request: Request,
    limit: u64,
    patience: Duration,
) -> Result<Vec<u8>, ApiError> {
    let context = request.extensions().get::<RequestContext>().cloned();
    let bytes = tokio::time::timeout(patience, read(request, limit)).await.map_err(|_| slow(patience))??;
    if let Some(context) = context {
        context.record.note().received = true;
    }
    Ok(bytes)
}

/// The error of a body that did not arrive in time.
pub(super) fn slow(patience: Duration) -> ApiError {
    ApiError::new(Kind::SlowBody, format!("the body did not arrive within {} ms", patience.as_millis()))
}

async fn read(request: Request, limit: u64) -> Result<Vec<u8>, ApiError> {
    let mut bytes = Vec::new();
    let mut chunks = request.into_body().into_data_stream();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| {
            ApiError::new(Kind::Malformed, format!("the body could not be read or decompressed: {error}"))
        })?;
        // Counted before it is kept: a small body may decompress into a huge one.
        if (bytes.len() + chunk.len()) as u64 > limit {
            return Err(too_large(limit));
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

fn too_large(limit: u64) -> ApiError {
    ApiError::new(Kind::BodyTooLarge, format!("the body is larger than {limit} bytes, the server's limit"))
}

/// Refuses by the headers what need not be read.
fn check_headers(headers: &HeaderMap, limit: u64) -> Result<(), ApiError> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    // Decompression takes off the encodings that it knows.
    if let Some(encoding) = text(header::CONTENT_ENCODING).filter(|encoding| *encoding != "identity") {
        let message =
            format!("content-encoding {encoding:?} is not supported; use zstd, gzip, br or deflate");
        return Err(ApiError::new(Kind::MediaType, message));
    }
    if let Some(media) = text(header::CONTENT_TYPE) {
        let media = media.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        if media.starts_with("multipart/") {
            return Err(ApiError::new(
                Kind::MediaType,
                "images are not supported, so multipart bodies are not read",
            ));
        }
        if media != "application/json" && !media.ends_with("+json") {
            let message = format!("content-type {media:?} is not supported; send application/json");
            return Err(ApiError::new(Kind::MediaType, message));
        }
    }
    match text(header::CONTENT_LENGTH).and_then(|length| length.parse::<u64>().ok()) {
        Some(length) if length > limit => Err(too_large(limit)),
        _ => Ok(()),
    }
}

/// A request's body, which the request's handler reads as far as it likes.
///
/// A connection can go on only behind a whole body. A client that is not told that it will not sends its next
/// request into a connection that is about to close, and loses it.
pub(super) struct Unread(Arc<Mutex<Incoming>>);

struct Incoming {
    body: BodyDataStream,
    /// The client sends nothing before it is asked to (`expect: 100-continue`), which the first read does.
    unasked: bool,
    ended: bool,
    /// Where its end is cannot be told any more.
    broken: bool,
}

impl Unread {
    /// Lends the request's handler its body.
    pub(super) fn of(request: &mut Request) -> Self {
        let unasked = request.headers().contains_key(header::EXPECT);
        let body = std::mem::take(request.body_mut()).into_data_stream();
        let ended = body.is_end_stream();
        let unread = Self(Arc::new(Mutex::new(Incoming { body, unasked, ended, broken: false })));
        if !ended {
            let body = unread.0.clone();
            *request.body_mut() =
                Body::from_stream(stream::poll_fn(move |context| lock(&body).poll(context)));
        }
        unread
    }

    /// Reads to no use what was left of it, if that is little and comes at once. Whether it is whole then.
    pub(super) async fn read_out(self) -> bool {
        {
            let incoming = lock(&self.0);
            let much = HttpBody::size_hint(&incoming.body).lower() > REST_BYTES as u64;
            if incoming.ended || incoming.broken || incoming.unasked || much {
                return incoming.ended;
            }
        }
        let read = async {
            let mut count = 0;
            while let Some(chunk) = poll_fn(|context| lock(&self.0).poll(context)).await {
                let Ok(chunk) = chunk else { return false };
                count += chunk.len();
                if count > REST_BYTES {
                    return false;
                }
            }
            true
        };
        tokio::time::timeout(REST_PATIENCE, read).await.unwrap_or(false)
    }
}

impl Incoming {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, Error>>> {
        self.unasked = false;
        let polled = Pin::new(&mut self.body).poll_next(context);
        self.broken |= matches!(polled, Poll::Ready(Some(Err(_))));
        self.ended = !self.broken && (matches!(polled, Poll::Ready(None)) || self.body.is_end_stream());
        polled
    }
}

fn lock(incoming: &Mutex<Incoming>) -> MutexGuard<'_, Incoming> {
    // After a panic it is only read out.
    incoming.lock().unwrap_or_else(PoisonError::into_inner)
}
