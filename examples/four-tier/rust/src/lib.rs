//! Chooses one of four tiers for a request: the model here, or one of three upstreams, weakest first.
//!
//! Free rules first: an acknowledgement stays here, and inside a tool loop the turn keeps the tier that it was given
//! when the user spoke. Then one step asks how demanding the request is, what is at stake and which domain it is in.
//! How demanding it is sets the tier; stakes, careful domains, doubt and retries only ever raise it.
//!
//! Configuration: docs/policies/four-tier.md.

mod tier;

use forkpoint_policy::*;
use std::time::Duration;
use tier::{Floors, Signals};

/// How long a turn's tier is kept for its tool loop.
const LOOP: Duration = Duration::from_secs(3600);

/// Below this mass the model did not take a question for one, or the probe knows nothing like it.
const UNSURE_BELOW: f64 = 0.02;

const DOMAINS: [(&str, &str); 6] = [
    ("chat", "small talk and everyday questions"),
    ("writing", "texts, summaries and translations"),
    ("code", "programs, commands and data"),
    ("law", "contracts, rights and official matters"),
    ("health", "medicine and the body"),
    ("money", "investments, taxes and payments"),
];

#[policy]
fn route(request: &Request, session: &Session) -> Result<Routing> {
    let names = tier_names(&config("upstreams").unwrap_or_else(|| "fast,strong,flagship".into()))?;
    let floors = Floors {
        levels: tier::levels(&config("tier-at").unwrap_or_else(|| "0.75,1.5,2.25".into()))?,
        stakes_at: config_within("stakes-at", 1.5, 0.0..=2.0)?,
        stakes_tier: config_within("stakes-tier", 3, 0..=3)?,
        careful_tier: config_within("careful-tier", 2, 0..=3)?,
        sure_from: config_within("sure-from", 0.5, 0.0..=1.0)?,
    };
    let careful = config_list("careful-domains", "law,health,money");
    let failed_tier = config_within("on-failure-tier", 3, 0..=3)?;

    let key = turn_key(request);
    if !request.since_user().is_empty()
        && let Some(tier) = kept(&key)
    {
        return Ok(send(&names, tier, "tool-loop"));
    }
    let text = request.last_user();
    if tier::acknowledges(text) {
        return Ok(send(&names, 0, "acknowledgement"));
    }
    let retries = tier::repeats(request, text) + header_retries(request);
    let asked = session.decide([
        score(
            "How demanding is the last request for a language model?",
            ["trivial", "simple", "demanding", "expert"],
        )
        .probe("difficulty"),
        score(
            "What is at stake if the answer to the last request is wrong?",
            ["nothing much", "some trouble or rework", "money, safety, health or rights"],
        ),
        choice("Which domain is the last request in?", DOMAINS),
    ]);
    let [difficulty, stakes, domain] = match asked {
        Ok(answers) => answers,
        Err(error) => {
            warn(&error.to_string());
            return Ok(send(&names, failed_tier, "engine-failed").label("failure", error.kind()));
        }
    };
    let signals = Signals {
        difficulty: difficulty.level,
        confidence: if difficulty.mass < UNSURE_BELOW { 0.0 } else { difficulty.confidence },
        stakes: stakes.level,
        careful: careful.iter().any(|name| domain.is(name)),
        retries,
    };
    let (tier, reason) = tier::choose(&signals, &floors);
    // Without the note a tool loop asks again, which costs a step and nothing else.
    if let Err(error) = store::set(&key, tier.to_string().as_bytes(), Some(LOOP)) {
        warn(&error.to_string());
    }
    Ok(send(&names, tier, reason)
        .figure("difficulty", difficulty.level)
        .figure("confidence", signals.confidence)
        .figure("stakes", stakes.level)
        .label("domain", domain.top())
        .label("retries", retries))
}

/// The three upstreams, weakest first.
fn tier_names(text: &str) -> Result<[String; 3]> {
    let names: Vec<String> = text.split(',').map(|name| name.trim().to_owned()).collect();
    match <[String; 3]>::try_from(names) {
        Ok(names) if names.iter().all(|name| !name.is_empty()) => Ok(names),
        _ => Err(format!("config upstreams = {text:?}: expected three names with commas between").into()),
    }
}

/// The plan of a tier: 0 is the model here.
fn send(names: &[String; 3], tier: usize, reason: &str) -> Routing {
    match tier.checked_sub(1).map(|at| names[at.min(2)].as_str()) {
        None => generate().because(reason).label("tier", "local"),
        Some(upstream) => forward(upstream).because(reason).label("tier", upstream),
    }
}

/// A key for the conversation up to what the user said last, which a tool loop does not move.
fn turn_key(request: &Request) -> String {
    let upto = request.messages.len() - request.since_user().len();
    format!("turn:{:016x}", stable_hash(request.messages[..upto].iter().map(|turn| &turn.content)))
}

fn kept(key: &str) -> Option<usize> {
    String::from_utf8(store::get(key)?).ok()?.parse().ok().filter(|tier| *tier <= 3)
}

/// What the retry counter of OpenAI's clients says, where the operator lets this policy see it.
fn header_retries(request: &Request) -> usize {
    request.header("x-stainless-retry-count").and_then(|value| value.trim().parse().ok()).unwrap_or(0)
}
