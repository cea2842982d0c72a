//! `POST /v1/chat/completions`: straight to the model, or by way of policies.

use std::sync::Arc;
use std::time::{Instant, SystemTime};

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::response::Response;
use forkpoint_engine::Generation;

use super::body::read_json;
use super::{App, RequestContext, Target, unix_seconds};
use crate::dispatch::{Account, Delivery, Form, Job, carry_out, reply};
use crate::policy::{Opening, RouteRequest, SamplingOverrides};
use crate::wire::ApiError;
use crate::wire::chat::{ChatRequest, Naming};

pub(super) async fn answer(
    State(app): State<Arc<App>>,
    Extension(context): Extension<RequestContext>,
    request: Request,
) -> Result<Response, ApiError> {
    let headers = request.headers().clone();
    let body = read_json(request, app.server.max_body_bytes.0).await?;
    let chat = ChatRequest::read(&body, &app.sampling)?;
    let target = app.target(chat.model.as_deref())?;
    context.time(|timeline| timeline.model = chat.model.clone());
    let salt = context.salted(chat.fields.cache_salt.as_deref());
    let delivery = Delivery {
        form: Form::Chat,
        stream: chat.fields.streams(),
        include_usage: chat.fields.includes_usage(),
        logprobs: chat.sampling.logprobs.is_some(),
        naming: app.naming("chatcmpl", &context),
        context,
    };
    match target {
        Target::Model => {
            let session = app.open(&delivery.context, app.engine.open(chat.conversation, &salt)).await?;
            let account = Account::of(session.usage());
            let generation = Generation { sampling: chat.sampling, ..Generation::default() };
            reply(session, generation, account, delivery).await
        }
        Target::Chain(chain) => {
            let mut conversation = chat.conversation;
            // Tools stand after the conversation, once a plan has chosen them: in the template's head they
            // would make every choice of tools another prompt.
            let tools = std::mem::take(&mut conversation.tools);
            let asked = Arc::new(RouteRequest {
                id: delivery.context.id.clone(),
                tenant: salt.clone(),
                model: chat.model.unwrap_or_else(|| super::AUTO.to_owned()),
                messages: conversation.messages.clone(),
                tools: tools.clone(),
                sampling: SamplingOverrides::set_in(&body, &chat.sampling),
                drafts: chat.sampling.clone(),
                headers: readable(&headers),
                trace: delivery.context.trace.clone(),
                deadline: Some(delivery.context.deadline),
            });
            let engine = app.engine.clone();
            let session = Opening::new(async move { engine.open(conversation, &salt).await }).noted({
                let (app, context) = (app.clone(), delivery.context.clone());
                |open| async move { app.open(&context, open).await }
            });
            app.note_begin(&delivery.context, &asked);
            delivery.context.time(|timeline| timeline.chain = Some((Instant::now(), Vec::new())));
            let routed = app.policies.route(&chain, asked.clone(), session).await;
            app.note_plan(&delivery.context, &asked, &routed);
            Ok(carry_out(&app, routed, Job { body, tools, sampling: chat.sampling, delivery }).await)
        }
    }
}

impl App {
    /// What names a reply of the loaded model; its id holds the request's.
    pub(super) fn naming(&self, prefix: &str, context: &RequestContext) -> Naming {
        context.record.note().model = Some(self.model().to_owned());
        Naming {
            id: format!("{prefix}-{}", context.id),
            created: unix_seconds(SystemTime::now()),
            model: self.model().to_owned(),
            fingerprint: self.fingerprint(),
        }
    }

    /// Tokens in a text, for replies that no model wrote.
    pub(crate) fn count_tokens(&self, text: &str) -> u32 {
        u32::try_from(self.engine.count_tokens(text)).unwrap_or(u32::MAX)
    }
}

/// Headers that are text; keys stay here.
fn readable(headers: &HeaderMap) -> Vec<(String, String)> {
    headers
        .iter()
        .filter(|(name, _)| !["authorization", "cookie", "proxy-authorization"].contains(&name.as_str()))
        .filter_map(|(name, value)| Some((name.to_string(), value.to_str().ok()?.to_owned())))
        .collect()
}
