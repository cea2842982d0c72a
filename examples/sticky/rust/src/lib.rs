//! Decides once for a conversation whether it is answered here or by an upstream, and stays with it.
//!
//! The first request asks one question and the decision is kept, under the client's session header or a hash of the
//! conversation's opening; later ones follow it without asking. Every few turns a conversation that is answered here is
//! looked at again. Moving throws away the keys and values that are warm here and makes the upstream read everything
//! anew, so the longer the session, the surer the gain must be: the bar rises from `move-at` to `sure-at`. What has
//! moved does not come back.
//!
//! Configuration: docs/policies/sticky.md.

mod place;

use forkpoint_policy::*;
use place::Place;
use std::time::Duration;

/// Below this mass the model did not take the question for one.
const UNSURE_BELOW: f64 = 0.02;

#[policy]
fn route(request: &Request, session: &Session) -> Result<Routing> {
    let upstream = config("upstream").unwrap_or_else(|| "strong".into());
    let move_at = config_within("move-at", 0.6, 0.0..=1.0)?;
    let sure_at = config_within("sure-at", 0.95, 0.0..=1.0)?;
    if move_at > sure_at {
        return Err(format!("config move-at = {move_at} lies above sure-at = {sure_at}").into());
    }
    let long = config_within("long-tokens", 4096, 1..=u32::MAX)?;
    let review_every = config_or("review-every", 6)?;
    let keep = Duration::from_secs(config_within("keep-seconds", 3600, 1..=u64::from(u32::MAX))?);
    let on_failure = config_or("on-failure", Outcome::Generate)?;

    let header = config("tenant-header").unwrap_or_else(|| "x-tenant".into());
    let key = key(request, request.filled_header(&header));
    let turns = request.messages.iter().filter(|turn| turn.role == Role::User).count();
    let known = store::get(&key).and_then(|value| Place::read(&value));
    if let Some(place) = &known
        && (place.moved || !request.since_user().is_empty() || !place.due(turns, review_every))
    {
        // Written again, so that a conversation that goes on is not forgotten.
        return Ok(stay(place, &upstream, "kept").label("store", keep_in_store(&key, place, keep)));
    }
    let asked = session.ask(
        boolean("Does this conversation need a stronger model than a small one to be answered well?")
            .sides("yes, it takes expert knowledge or long reasoning", "no, a short plain answer will do"),
    );
    let need = match asked {
        Ok(answer) => answer,
        // Nothing is kept, so that the next request asks.
        Err(error) => return Ok(on_failure.after(&error)),
    };
    let tokens = session.usage().tokens;
    let bar = place::bar(move_at, sure_at, tokens, long);
    let sure = need.mass >= UNSURE_BELOW;
    let place = Place { moved: sure && need.yes >= bar, turns };
    let reason = match (place.moved, &known) {
        (true, Some(_)) => "moved",
        (true, None) => "chosen",
        (false, _) if !sure => "unsure",
        (false, _) if need.yes >= move_at => "regret",
        (false, Some(_)) => "kept",
        (false, None) => "chosen",
    };
    Ok(stay(&place, &upstream, reason)
        .figure("need", need.yes)
        .figure("bar", bar)
        .label("tokens", tokens)
        .label("store", keep_in_store(&key, &place, keep)))
}

/// The client's own name for the conversation where it gives one, since openings can be alike; another tenant's of the
/// same name is another conversation.
fn key(request: &Request, tenant: Option<&str>) -> String {
    match request.filled_header("x-session-id") {
        Some(id) => format!("session:{:016x}", stable_hash(tenant.into_iter().chain([id]))),
        None => format!("opening:{}", request.conversation_key(tenant)),
    }
}

fn stay(place: &Place, upstream: &str, reason: &str) -> Routing {
    if place.moved {
        forward(upstream).because(reason).label("place", upstream)
    } else {
        generate().because(reason).label("place", "local")
    }
}

/// A full store costs the next request a question; it does not cost this one its reply.
fn keep_in_store(key: &str, place: &Place, keep: Duration) -> &'static str {
    match store::set(key, place.to_string().as_bytes(), Some(keep)) {
        Ok(()) => "ok",
        Err(error) => {
            warn(&error.to_string());
            "full"
        }
    }
}
