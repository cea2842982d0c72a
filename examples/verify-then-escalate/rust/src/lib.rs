//! Answers here when the draft holds up, and asks a stronger model when it does not.
//!
//! A draft is written on a fork, so that the request's own session stays as it is. Then one step asks of the fork, which
//! holds the draft, whether it answers the request and whether it is supported. A draft that passes is the reply; one
//! that fails either question is thrown away and the request forwarded. Escalations are capped to a share of each block
//! of requests; once it is spent the model here answers without a draft, since nothing could come of judging it.
//!
//! Configuration: docs/policies/verify-then-escalate.md.

use forkpoint_policy::*;
use std::time::Duration;

/// Below this mass the model did not take the question for one.
const UNSURE_BELOW: f64 = 0.02;

/// How long a block's counter is kept: longer than any block lasts, and not for good.
const KEPT: Duration = Duration::from_secs(86_400);

struct Settings {
    upstream: String,
    answers_from: f64,
    supported_from: f64,
    draft_tokens: u32,
    /// Escalations that a block of requests may have.
    cap: i64,
    block: i64,
}

#[policy]
fn route(request: &Request, session: &Session) -> Result<Routing> {
    let block = config_within("block", 100, 1..=1_000_000)?;
    let share: f64 = config_within("escalate-share", 0.2, 0.0..=1.0)?;
    let settings = Settings {
        upstream: config("upstream").unwrap_or_else(|| "strong".into()),
        answers_from: config_within("answers-from", 0.6, 0.0..=1.0)?,
        supported_from: config_within("supported-from", 0.6, 0.0..=1.0)?,
        draft_tokens: config_within("draft-tokens", 256, 1..=4096)?,
        // A share such as .29 of 100 is a little less in binary.
        cap: (share * block as f64 + 1e-9).floor() as i64,
        block,
    };
    if share > 0.0 && settings.cap == 0 {
        return Err(
            format!("config escalate-share = {share} of block = {block}: less than one request").into()
        );
    }
    let on_failure = config_or("on-failure", Outcome::Forward(settings.upstream.clone(), None))?;

    // A draft with tools may be a call rather than an answer, and a tool's result has its own judge.
    if !request.tools.is_empty() || !request.since_user().is_empty() {
        return Ok(generate().because("tools"));
    }
    let counter = this_block(&settings)?;
    let spent = store::count(&counter);
    if spent >= settings.cap {
        return Ok(capped(spent, settings.cap));
    }
    match verify(request, session, &settings) {
        Ok((true, routing)) => Ok(routing),
        Ok((false, routing)) => Ok(match escalate(&counter, settings.cap)? {
            Some(escalated) => routing.label("escalated", escalated).label("cap", settings.cap),
            None => capped(settings.cap, settings.cap),
        }),
        Err(error) => {
            if matches!(on_failure, Outcome::Forward(..)) && escalate(&counter, settings.cap)?.is_none() {
                warn(&error.to_string());
                return Ok(capped(settings.cap, settings.cap));
            }
            Ok(on_failure.after(&error))
        }
    }
}

/// Counts an escalation and says how many there are with it; nothing where other requests took the last one while this
/// one was judged.
fn escalate(counter: &str, cap: i64) -> Result<Option<i64>> {
    let escalated = store::add(counter, 1, Some(KEPT))?;
    if escalated <= cap {
        return Ok(Some(escalated));
    }
    store::add(counter, -1, Some(KEPT))?;
    Ok(None)
}

fn capped(escalated: i64, cap: i64) -> Routing {
    generate().because("capped").label("escalated", escalated).label("cap", cap)
}

/// Drafts and judges: whether the answer stays here, and the plan.
fn verify(request: &Request, session: &Session, settings: &Settings) -> Result<(bool, Routing)> {
    let fork = session.fork()?;
    let most =
        request.sampling.max_tokens.map_or(settings.draft_tokens, |most| most.min(settings.draft_tokens));
    let draft = fork.draft(&Sampling { max_tokens: Some(most), ..Sampling::default() })?;
    if draft.text.trim().is_empty() {
        return Ok((false, forward(&settings.upstream).because("escalated").label("why", "empty")));
    }
    let [answers, supported] = fork.decide([
        boolean("Does the assistant's last reply answer what the user asked?"),
        boolean("Is the assistant's last reply correct and supported, with nothing made up?"),
    ])?;
    let why = if answers.mass < UNSURE_BELOW || supported.mass < UNSURE_BELOW {
        Some("unsure")
    } else if answers.yes < settings.answers_from {
        Some("no-answer")
    } else if supported.yes < settings.supported_from {
        Some("unsupported")
    } else {
        None
    };
    let routing = match why {
        Some(why) => forward(&settings.upstream).because("escalated").label("why", why),
        None if draft.finish_reason == "stop" => reply(draft.text).because("verified"),
        // The draft was cut: its beginning holds up, and the whole is written anew.
        None => generate().because("long-answer"),
    };
    let routing = routing
        .figure("answers", answers.yes)
        .figure("supported", supported.yes)
        .label("draft-tokens", draft.tokens);
    Ok((why.is_none(), routing))
}

/// The key under which this block of requests counts its escalations. Blocks are of requests, because a policy has no
/// clock.
fn this_block(settings: &Settings) -> Result<String> {
    let request = store::add("requests", 1, None)?;
    Ok(format!("escalated:{}", (request - 1) / settings.block))
}
