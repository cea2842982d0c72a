//! A reply from the model in this process.
//!
//! The engine's stream lives in the response's body. A client that leaves drops the body, the body drops the
//! stream, and the engine ends the generation and takes its pages back.

use std::time::Duration;

use async_stream::stream;
use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use forkpoint_engine::{Ended, Event, Generation, Session, Stream, Usage};

use super::delivery::{Delivery, Form, event_stream, json_response};
use crate::serve::RequestContext;
use crate::traces::{Dispatched, Phase};
use crate::wire::chat::UsageReport;
use crate::wire::{ApiError, Kind, sse};

/// How long a stream may be silent before a comment keeps it open.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// What was spent before the reply.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Account {
    /// Tokens that the reply continues from.
    pub(crate) tokens: u32,
    /// Of those, tokens that were resident already.
    pub(crate) reused: u32,
    /// Questions answered on the way.
    pub(crate) decisions: u32,
    /// Suffix tokens computed for them.
    pub(crate) decided: u32,
}

impl Account {
    /// What a request's session tells.
    pub(crate) fn of(usage: Usage) -> Self {
        Self {
            tokens: usage.tokens,
            reused: usage.reused,
            decisions: usage.decisions,
            decided: usage.decided,
        }
    }

    /// The same, where the reply continues from a fork that may hold more.
    pub(crate) fn grown_to(self, session: &Session) -> Self {
        Self { tokens: session.usage().tokens, ..self }
    }

    /// The usage of a request that ends before the model writes anything.
    pub(crate) fn before_reply(self) -> UsageReport {
        self.report(0)
    }

    fn report(self, completion: u32) -> UsageReport {
        UsageReport {
            prompt: self.tokens,
            completion,
            reused: self.reused,
            computed: self.tokens.saturating_sub(self.reused),
            decisions: self.decisions,
            decided: self.decided,
        }
    }

    fn ended(self, ended: Ended) -> UsageReport {
        Self { tokens: ended.context, ..self }.report(ended.generated)
    }
}

/// Generates a reply on a session and delivers it.
///
/// # Errors
/// When it cannot start; what goes wrong later in a stream arrives as its last event.
pub(crate) async fn reply(
    session: Session,
    generation: Generation,
    account: Account,
    delivery: Delivery,
) -> Result<Response, ApiError> {
    let operation = match delivery.form {
        Form::Chat => "chat",
        Form::Text => "text_completion",
    };
    delivery.context.time(|timeline| {
        timeline.dispatched = Some((Phase::begin(), Dispatched::Generate { operation, finish: None }));
    });
    let mut stream = session.generate(generation).await?;
    // The reply has a fork of its own.
    drop(session);
    // For the log of a client that leaves before the end.
    delivery.context.record.note().usage = Some(account.before_reply());
    if !delivery.stream {
        return collect(stream, account, &delivery).await;
    }
    // The first event is awaited here: what fails before it is told by the status.
    let first = next(&mut stream, &delivery).await?;
    Ok(event_stream(Body::from_stream(events(first, stream, account, delivery))))
}

async fn collect(mut stream: Stream, account: Account, delivery: &Delivery) -> Result<Response, ApiError> {
    let (mut whole, mut all) = (String::new(), Vec::new());
    loop {
        match next(&mut stream, delivery).await? {
            Event::Text { text, tokens } => {
                whole.push_str(&text);
                all.extend(tokens);
            }
            Event::End(ended) => {
                let usage = note_end(&delivery.context, account, ended);
                return Ok(json_response(&delivery.whole(&whole, &all, ended.reason, usage)));
            }
            Event::Failed(error) => return Err(error.into()),
        }
    }
}

/// The reply is whole: what the log and the request's spans say of it.
fn note_end(context: &RequestContext, account: Account, ended: Ended) -> UsageReport {
    let usage = account.ended(ended);
    context.record.note().usage = Some(usage);
    context.time(|timeline| timeline.generated(ended.reason));
    usage
}

/// The next event within the request's deadline; a failure is an error.
async fn next(stream: &mut Stream, delivery: &Delivery) -> Result<Event, ApiError> {
    match tokio::time::timeout_at(delivery.context.deadline.into(), stream.next()).await {
        Ok(Some(Event::Failed(error))) => Err(error.into()),
        Ok(Some(event)) => Ok(event),
        Ok(None) => Err(ApiError::new(Kind::Internal, "the engine ended the reply without saying why")),
        Err(_) => Err(ApiError::new(Kind::Timeout, "the reply was not whole within the request's time")),
    }
}

fn events(
    first: Event,
    mut stream: Stream,
    account: Account,
    delivery: Delivery,
) -> impl futures::Stream<Item = Result<Bytes, std::convert::Infallible>> {
    stream! {
        if let Some(opening) = delivery.opening() {
            yield Ok(opening);
        }
        let mut offset = 0;
        let mut pending = Some(first);
        loop {
            let event = match pending.take() {
                Some(event) => Ok(event),
                None => {
                    // Held across keep-alives, so that no event is lost with a dropped future.
                    let mut waiting = std::pin::pin!(next(&mut stream, &delivery));
                    loop {
                        tokio::select! {
                            event = &mut waiting => break event,
                            () = tokio::time::sleep(KEEP_ALIVE) => yield Ok(sse::KEEP_ALIVE),
                        }
                    }
                }
            };
            match event {
                Ok(Event::Text { text, tokens }) => {
                    if text.is_empty() && tokens.is_empty() {
                        continue;
                    }
                    yield Ok(delivery.part(&text, &tokens, offset));
                    offset += text.chars().count();
                }
                Ok(Event::End(ended)) => {
                    let usage = note_end(&delivery.context, account, ended);
                    yield Ok(delivery.closing(ended.reason, usage, offset));
                    return;
                }
                Ok(Event::Failed(error)) => {
                    yield Ok(broken_off(&delivery, &error.into()));
                    return;
                }
                Err(error) => {
                    yield Ok(broken_off(&delivery, &error));
                    return;
                }
            }
        }
    }
}

/// The last event of a stream that cannot go on.
fn broken_off(delivery: &Delivery, error: &ApiError) -> Bytes {
    delivery.context.record.note().error = Some(error.code());
    let mut bytes = sse::event(&serde_json::json!({ "error": error.to_openai() })).to_vec();
    bytes.extend_from_slice(&sse::DONE);
    bytes.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_reused_is_computed() {
        let account = Account { tokens: 100, reused: 90, decisions: 2, decided: 30 };
        let usage = account.report(7);
        assert_eq!((usage.prompt, usage.completion, usage.reused, usage.computed), (100, 7, 90, 10));
        assert_eq!((usage.decisions, usage.decided), (2, 30));
    }
}
