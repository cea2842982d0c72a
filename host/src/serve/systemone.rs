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
use crate::probe::shelf::Entry;
use crate::traces::{self, Phase};
use crate::wire::chat::UsageReport;
use crate::wire::systemone::{Asked, SystemOneRequest};
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
    context.time(|timeline| timeline.model = asked.model.clone());
    let probes = app.probes(&asked.asked)?;
    // A model that reads no labels may still be read by a probe.
    if probes.iter().any(|probe| probe.as_ref().is_none_or(|entry| entry.probe().is_none())) {
        app.can_decide()?;
    }
    let salt = context.salted(asked.cache_salt.as_deref());
    let (answers, usage) = app
        .ask(context, asked.conversation.clone(), &asked.questions, &probes, &salt)
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
        probes: &[Option<Arc<Entry>>],
        salt: &str,
    ) -> Result<(Vec<Answer>, Usage), EngineError> {
        context.record.note().model = Some(self.model().to_owned());
        let mut session = self.open(context, self.engine.open(conversation, salt)).await?;
        let fitted: Vec<_> =
            probes.iter().map(|entry| entry.as_ref().and_then(|entry| entry.probe())).collect();
        let words = |(index, question): (usize, &Question)| {
            let entry = probes.get(index).and_then(Option::as_ref);
            entry.map_or_else(|| question.clone(), |entry| entry.worded(question))
        };
        let questions: Vec<Question> = questions.iter().enumerate().map(words).collect();
        context.time(|timeline| timeline.decided = Some((Phase::begin(), None)));
        let answers = session.decide_by(&questions, &fitted).await;
        context.time(|timeline| {
            if let Some((phase, asked)) = &mut timeline.decided {
                phase.end();
                *asked = answers.as_ref().ok().map(|answers| traces::Asked {
                    questions: answers.len(),
                    probes: probes.iter().flatten().map(|entry| entry.name().to_owned()).collect(),
                    rungs: answers.iter().map(|answer| answer.rung).collect(),
                    failure: None,
                });
            }
        });
        let answers = answers?;
        for (entry, answer) in probes.iter().zip(&answers) {
            if let Some(entry) = entry {
                entry.count(answer.rung);
            }
        }
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

    /// The probes that questions name; none for those that name none.
    ///
    /// # Errors
    /// Names the question whose probe there is not.
    fn probes(&self, asked: &[Asked]) -> Result<Vec<Option<Arc<Entry>>>, ApiError> {
        let find = |asked: &Asked| match &asked.probe {
            None => Ok(None),
            Some(name) => self.policies.probe(name).map(Some).map_err(|message| {
                ApiError::at([json!("questions"), json!(asked.id), json!("x_probe")], message)
            }),
        };
        asked.iter().map(find).collect()
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
