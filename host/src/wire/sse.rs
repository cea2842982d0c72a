//! Server-sent events, as OpenAI's clients read them: one `data:` line each.

use bytes::Bytes;
use serde_json::Value;

/// The last event of a stream.
pub const DONE: Bytes = Bytes::from_static(b"data: [DONE]\n\n");

/// A comment that keeps an idle connection open.
pub const KEEP_ALIVE: Bytes = Bytes::from_static(b": keep-alive\n\n");

/// One event. `serde_json` writes no line breaks, so one `data:` line holds it.
#[must_use]
pub fn event(data: &Value) -> Bytes {
    Bytes::from(format!("data: {data}\n\n"))
}
