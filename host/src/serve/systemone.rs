//! `POST /v1/systemone`: typed questions in TypeSafe's wire.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use forkpoint_engine::{Answer, Conversation, EngineError, Question, Usage};
use serde_json::json;

use super::body::read_json;
use super::{App, ErrorCode, RequestContext, TYPESAFE_ALIAS};
use crate::dispatch::json_response;
use crate::wire::chat::UsageReport;
use crate::wire::systemone::SystemOneRequest;
use crate::wire::{ApiError, Dialect, Kind};

pub(super) async fn answer(
    State(app): State<Arc<App>>,
    Extension(context): Extension<RequestContext>,
    request: Request,
) -> Response {
    decide(&app, &context, request).await.unwrap_or_else(|error| {
        let code = ErrorCode(error.code());
        let mut response = error.into_response(Dialect::TypeSafe);
        response.extensions_mut().insert(code);
        response
    })
}

async fn decide(app: &App, context: &RequestContext, request: Request) -> Result<Response, ApiError> {
    let body = read_json(request, app.server.max_body_bytes.0).await?;
    let asked = SystemOneRequest::read(&body)?;
    app.plain_model(asked.model.as_deref().filter(|model| *model != TYPESAFE_ALIAS))?;
    app.can_decide()?;
    let salt = context.salted(asked.cache_salt.as_deref());
    let (answers, usage) = app
        .ask(context, asked.conversation.clone(), &asked.questions, &salt)
        .await
        .map_err(|error| match error {
            // What the engine calls invalid here is a question; its place is known only in words.
            EngineError::Invalid(message) => ApiError::field("questions", message),
            error => error.into(),
        })?;
    Ok(json_response(&json!({
        "model": app.model(),
        "answers": asked.answers(&answers),
        "usage": {
            // The state once, and each question's own part: the same whether the state was warm or cold.
            "input_tokens": usage.tokens + usage.decided,
            "output_tokens": 0,
            "input_tokens_details": { "cached_tokens": usage.reused },
        },
    })))
}

impl App {
    /// Asks the model questions about a conversation.
    pub(super) async fn ask(
        &self,
        context: &RequestContext,
        conversation: Conversation,
        questions: &[Question],
        salt: &str,
    ) -> Result<(Vec<Answer>, Usage), EngineError> {
        context.record.note().model = Some(self.model().to_owned());
        let mut session = self.engine.open(conversation, salt).await?;
        let answers = session.decide(questions).await?;
        let usage = session.usage();
        context.record.note().usage = Some(UsageReport {
            prompt: usage.tokens,
            completion: 0,
            reused: usage.reused,
            computed: usage.computed,
            decisions: usage.decisions,
            decided: usage.decided,
        });
        Ok((answers, usage))
    }

    /// Why the loaded model answers no questions, as an error; nothing where it does.
    ///
    /// # Errors
    /// [`Kind::Unsupported`].
    pub(super) fn can_decide(&self) -> Result<(), ApiError> {
        match &self.engine.model().decide_unsupported {
            None => Ok(()),
            Some(reason) => {
                let message = format!("the model {} answers no typed questions: {reason}", self.model());
                Err(ApiError::field("model", message).with_kind(Kind::Unsupported))
            }
        }
    }
}
