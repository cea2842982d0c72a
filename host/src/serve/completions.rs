//! `POST /v1/completions`: the model continues a text.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use forkpoint_engine::Generation;

use super::body::read_json;
use super::{App, RequestContext};
use crate::dispatch::{Account, Delivery, Form, reply};
use crate::wire::ApiError;
use crate::wire::completions::CompletionRequest;

pub(super) async fn answer(
    State(app): State<Arc<App>>,
    Extension(context): Extension<RequestContext>,
    request: Request,
) -> Result<Response, ApiError> {
    let body = read_json(request, app.server.max_body_bytes.0).await?;
    let asked = CompletionRequest::read(&body, &app.sampling)?;
    app.plain_model(asked.model.as_deref())?;
    context.time(|timeline| timeline.model = asked.model.clone());
    let delivery = Delivery {
        form: Form::Text,
        stream: asked.fields.streams(),
        include_usage: asked.fields.includes_usage(),
        logprobs: asked.sampling.logprobs.is_some(),
        naming: app.naming("cmpl", &context),
        context,
    };
    let salt = delivery.context.salted(asked.fields.cache_salt.as_deref());
    let session = app.open(&delivery.context, app.engine.open_text(&asked.prompt, &salt)).await?;
    let account = Account::of(session.usage());
    let generation = Generation { sampling: asked.sampling, ..Generation::default() };
    reply(session, generation, account, delivery).await
}
