//! Errors as clients read them: one cause, rendered in the dialect of the route it happened on.

use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, Response, StatusCode, header};
use forkpoint_engine::EngineError;
use serde_json::{Value, json};

/// The shape that a route's errors take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// `{"error": {message, type, param, code}}`.
    OpenAi,
    /// `{"detail": …}`, with OpenAI's object beside it for clients that read that first.
    TypeSafe,
}

impl Dialect {
    /// The dialect that a path speaks.
    #[must_use]
    pub fn of(path: &str) -> Self {
        if path == "/v1/systemone" { Self::TypeSafe } else { Self::OpenAi }
    }
}

/// What went wrong. Each kind has one row in one table (`Kind::row`), which says how either dialect shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// The body is not JSON, or not text, or not decodable.
    Malformed,
    /// A field is missing, of the wrong type or out of range.
    Invalid,
    /// The request is well formed, but asks for what this server does not do.
    Unsupported,
    /// The conversation outgrows the context window.
    TooLong,
    /// The body is larger than the server takes.
    BodyTooLarge,
    /// The body is of a media type or encoding that the server does not read.
    MediaType,
    /// No key, or a wrong one.
    Unauthorized,
    /// The key is good, and not for this.
    Forbidden,
    /// No model of that name is served.
    UnknownModel,
    /// No such route, or no such thing on it.
    NotFound,
    /// The route exists and takes another method.
    Method,
    /// Too many requests are in flight.
    Busy,
    /// The KV cache has no room now.
    Full,
    /// The server is shutting down.
    Stopping,
    /// The body did not arrive in time.
    SlowBody,
    /// The request took longer than the server allows.
    Timeout,
    /// An upstream did not answer, or not usefully; the code says which.
    Upstream {
        /// 502 or 504.
        status: u16,
        /// Such as `upstream_unreachable`.
        code: &'static str,
    },
    /// A policy refused the request.
    Rejected {
        /// From 400 to 599.
        status: u16,
        /// The policy's own code.
        code: String,
        /// In seconds, where the policy says when to ask again.
        retry_after: Option<u32>,
    },
    /// A fault of the server.
    Internal,
}

/// How a kind is shown: status and type for OpenAI, code, then status and error type for TypeSafe.
struct Row {
    openai: (u16, &'static str),
    code: Option<String>,
    typesafe: (u16, &'static str),
}

impl Kind {
    fn row(&self) -> Row {
        let row = |openai, code: &str, typesafe| Row {
            openai,
            code: (!code.is_empty()).then(|| code.to_owned()),
            typesafe,
        };
        const INVALID: &str = "invalid_request_error";
        const SERVER: &str = "server_error";
        match self {
            Self::Malformed => row((400, INVALID), "invalid_json", (422, "validation_error")),
            Self::Invalid => row((400, INVALID), "invalid_value", (422, "validation_error")),
            Self::Unsupported => row((400, INVALID), "unsupported", (422, "api_usage_error")),
            Self::TooLong => row((400, INVALID), "context_length_exceeded", (413, "max_tokens_exceeded")),
            Self::BodyTooLarge => row((413, INVALID), "request_too_large", (413, "request_too_large")),
            Self::MediaType => row((415, INVALID), "unsupported_media_type", (415, "api_usage_error")),
            Self::Unauthorized => {
                row((401, "authentication_error"), "invalid_api_key", (401, "authentication_error"))
            }
            Self::Forbidden => {
                row((403, "permission_error"), "operators_only", (403, "authentication_error"))
            }
            Self::UnknownModel => row((404, INVALID), "model_not_found", (400, "api_usage_error")),
            Self::NotFound => row((404, INVALID), "not_found", (404, "api_usage_error")),
            Self::Method => row((405, INVALID), "method_not_allowed", (405, "api_usage_error")),
            Self::Busy => row((429, "rate_limit_error"), "server_busy", (429, "rate_limit_error")),
            Self::Full => row((503, SERVER), "kv_cache_full", (529, "overloaded_error")),
            Self::Stopping => row((503, SERVER), "shutting_down", (503, "overloaded_error")),
            Self::SlowBody => row((408, INVALID), "body_timeout", (408, "timeout_error")),
            Self::Timeout => row((504, SERVER), "request_timeout", (504, "timeout_error")),
            Self::Upstream { status, code } => {
                row((*status, "upstream_error"), code, (*status, "upstream_error"))
            }
            Self::Rejected { status, code, .. } => {
                let kind = if *status < 500 { INVALID } else { SERVER };
                row((*status, kind), code, (*status, "policy_rejection"))
            }
            Self::Internal => row((500, SERVER), "internal_error", (500, "internal_error")),
        }
    }

    /// When a client may try again, where waiting helps.
    fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Busy | Self::Full => Some(Duration::from_secs(1)),
            Self::Stopping => Some(Duration::from_secs(5)),
            Self::Rejected { retry_after, .. } => {
                retry_after.map(|seconds| Duration::from_secs(u64::from(seconds)))
            }
            _ => None,
        }
    }
}

/// An error on its way to a client.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// What went wrong.
    pub kind: Kind,
    /// In words: what was expected and what came.
    pub message: String,
    /// The field at fault, as a path: each step a name or a number.
    pub path: Vec<Value>,
}

impl ApiError {
    /// An error that belongs to no field.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), path: Vec::new() }
    }

    /// A bad value in a top-level field; the message names the field.
    pub fn field(name: &str, message: impl AsRef<str>) -> Self {
        Self::at([Value::from(name)], message)
    }

    /// A bad value somewhere in the body; the message names the place.
    pub fn at(path: impl IntoIterator<Item = Value>, message: impl AsRef<str>) -> Self {
        let path: Vec<Value> = path.into_iter().collect();
        let message = format!("{}: {}", dotted(&path), message.as_ref());
        Self { kind: Kind::Invalid, message, path }
    }

    /// The same error as another kind.
    #[must_use]
    pub fn with_kind(mut self, kind: Kind) -> Self {
        self.kind = kind;
        self
    }

    /// The HTTP status in a dialect.
    #[must_use]
    pub fn status(&self, dialect: Dialect) -> StatusCode {
        let row = self.kind.row();
        let status = if dialect == Dialect::OpenAi { row.openai.0 } else { row.typesafe.0 };
        StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    /// The stable code, for programs and metrics.
    #[must_use]
    pub fn code(&self) -> String {
        self.kind.row().code.unwrap_or_default()
    }

    /// OpenAI's error object, which also goes into broken-off streams.
    #[must_use]
    pub fn to_openai(&self) -> Value {
        let row = self.kind.row();
        let param = (!self.path.is_empty()).then(|| dotted(&self.path));
        json!({ "message": self.message, "type": row.openai.1, "param": param, "code": row.code })
    }

    /// The whole response body in a dialect.
    #[must_use]
    pub fn to_body(&self, dialect: Dialect) -> Value {
        if dialect == Dialect::OpenAi {
            return json!({ "error": self.to_openai() });
        }
        let row = self.kind.row();
        let detail = if row.typesafe.0 == 422 {
            let loc: Vec<Value> =
                std::iter::once(Value::from("body")).chain(self.path.iter().cloned()).collect();
            json!([{ "loc": loc, "msg": self.message, "type": row.code }])
        } else {
            json!({ "error_type": row.typesafe.1, "message": self.message })
        };
        json!({ "detail": detail, "error": self.to_openai() })
    }

    /// The response in a dialect, with retry headers where waiting helps.
    #[must_use]
    pub fn into_response(self, dialect: Dialect) -> Response<Body> {
        let mut response = Response::new(Body::from(self.to_body(dialect).to_string()));
        *response.status_mut() = self.status(dialect);
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(wait) = self.kind.retry_after() {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(wait.as_secs()));
            headers.insert(
                HeaderName::from_static("retry-after-ms"),
                HeaderValue::from(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX)),
            );
        }
        if self.kind == Kind::Unauthorized {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        Self::from(&error)
    }
}

impl From<&EngineError> for ApiError {
    fn from(error: &EngineError) -> Self {
        let kind = match error {
            EngineError::Invalid(_) | EngineError::Template(_) => Kind::Invalid,
            EngineError::TooLong { .. } => Kind::TooLong,
            EngineError::Full { .. } => Kind::Full,
            EngineError::Busy { .. } => Kind::Busy,
            EngineError::Stopped => Kind::Stopping,
            _ => Kind::Internal,
        };
        Self::new(kind, error.to_string())
    }
}

/// A path as people write it: `messages[0].content`.
fn dotted(path: &[Value]) -> String {
    let mut text = String::new();
    for step in path {
        match step {
            Value::String(name) if text.is_empty() => text.push_str(name),
            Value::String(name) => {
                text.push('.');
                text.push_str(name);
            }
            step => text.push_str(&format!("[{step}]")),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_error_reads_right_in_both_dialects() {
        let error = ApiError::at([json!("messages"), json!(0), json!("role")], "expected a role, got 3");
        assert_eq!(error.status(Dialect::OpenAi), 400);
        assert_eq!(
            error.to_body(Dialect::OpenAi),
            json!({"error": {
                "message": "messages[0].role: expected a role, got 3",
                "type": "invalid_request_error", "param": "messages[0].role", "code": "invalid_value"
            }})
        );
        assert_eq!(error.status(Dialect::TypeSafe), 422);
        assert_eq!(
            error.to_body(Dialect::TypeSafe)["detail"][0]["loc"],
            json!(["body", "messages", 0, "role"])
        );
    }

    #[test]
    fn overload_says_when_to_come_back() {
        for (kind, openai, typesafe) in [(Kind::Busy, 429, 429), (Kind::Full, 503, 529)] {
            for (dialect, status) in [(Dialect::OpenAi, openai), (Dialect::TypeSafe, typesafe)] {
                let response = ApiError::new(kind.clone(), "later").into_response(dialect);
                assert_eq!(response.status(), status);
                assert_eq!(response.headers()["retry-after"], "1");
                assert_eq!(response.headers()["retry-after-ms"], "1000");
            }
        }
    }

    #[test]
    fn a_rejection_says_when_to_come_back_where_its_policy_did() {
        for (retry_after, header) in
            [(None, None), (Some(0), Some("0")), (Some(u32::MAX), Some("4294967295"))]
        {
            let kind = Kind::Rejected { status: 403, code: "spent".into(), retry_after };
            let response = ApiError::new(kind, "later").into_response(Dialect::OpenAi);
            let said = response.headers().get("retry-after").map(|value| value.to_str().unwrap());
            assert_eq!((response.status().as_u16(), said), (403, header));
            assert_eq!(response.headers().contains_key("retry-after-ms"), header.is_some());
        }
    }

    #[test]
    fn a_client_mistake_is_never_a_server_error() {
        let mistakes = [
            Kind::Malformed,
            Kind::Invalid,
            Kind::Unsupported,
            Kind::TooLong,
            Kind::BodyTooLarge,
            Kind::MediaType,
            Kind::Unauthorized,
            Kind::Forbidden,
            Kind::UnknownModel,
            Kind::NotFound,
            Kind::Method,
        ];
        for kind in mistakes {
            for dialect in [Dialect::OpenAi, Dialect::TypeSafe] {
                let status = ApiError::new(kind.clone(), "").status(dialect);
                assert!(status.is_client_error(), "{kind:?} in {dialect:?} is {status}");
            }
        }
    }
}
