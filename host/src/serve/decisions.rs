//! `POST /v1/decisions`: typed questions in OpenAI's wire.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use forkpoint_engine::EngineError;
use serde_json::json;

use super::body::read_json;
use super::{App, RequestContext};
use crate::dispatch::json_response;
use crate::wire::ApiError;
use crate::wire::decisions::DecisionsRequest;

pub(super) async fn answer(
    State(app): State<Arc<App>>,
    Extension(context): Extension<RequestContext>,
    request: Request,
) -> Result<Response, ApiError> {
    let body = read_json(request, app.server.max_body_bytes.0).await?;
    let asked = DecisionsRequest::read(&body)?;
    app.plain_model(asked.model.as_deref())?;
    context.time(|timeline| timeline.model = asked.model.clone());
    app.can_decide()?;
    let salt = context.salted(asked.cache_salt.as_deref());
    let (answers, usage) = app
        .ask(&context, asked.conversation.clone(), &asked.questions, &[], &salt)
        .await
        .map_err(|error| match error {
            EngineError::Invalid(message) => ApiError::field("questions", message),
            error => error.into(),
        })?;
    let input = usage.tokens + usage.decided;
    Ok(json_response(&json!({
        "object": "decision",
        "model": app.model(),
        "answers": asked.answers(&answers),
        "usage": {
            "input_tokens": input,
            "input_tokens_details": { "cached_tokens": usage.reused, "cache_write_tokens": 0 },
            "output_tokens": 0,
            "output_tokens_details": { "reasoning_tokens": 0 },
            "total_tokens": input,
        },
    })))
}
