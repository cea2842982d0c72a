//! Keeps what is private here: requests that hold personal data or secrets are answered by the model in this process,
//! and only the rest may leave.
//!
//! Free rules first: mail addresses, IBANs, card and telephone numbers, keys and tokens are found by their form, in all
//! that was said and called, since all of it would leave. What has no form is asked about in one step: personal data of a
//! probe that knows the like, secrets of the model. Doubt keeps a request here, and a conversation that was found private
//! stays private.
//!
//! Configuration: docs/policies/privacy.md.

mod patterns;

use forkpoint_policy::*;
use patterns::Kind;
use std::time::Duration;

/// Below this mass the text is unlike all that the probe knows, or the model took the question for none.
const UNSURE_BELOW: f64 = 0.02;

#[policy]
fn route(request: &Request, session: &Session) -> Result<Routing> {
    let private_at: f64 = config_within("private-at", 0.5, 0.0..=1.0)?;
    let labels_at: f64 = config_within("private-at-labels", 0.3, 0.0..=1.0)?;
    let secret_at = config_within("secret-at", 0.8, 0.0..=1.0)?;
    let keep = Duration::from_secs(config_within("keep-seconds", 86_400, 1..=u64::from(u32::MAX))?);
    let private = config_or("private", Outcome::Generate)?;
    let secret = config_or("secret", private.clone())?;
    let elsewhere = config_or("elsewhere", Outcome::Forward("strong".into(), None))?;
    let on_failure = config_or("on-failure", private.clone())?;
    let (stays, holds_secret) =
        ("The request holds personal data.", "The request holds a secret; take it out.");

    let said = request.messages.iter().flat_map(|turn| {
        let calls = turn.tool_calls.iter().map(|call| call.arguments.as_str());
        calls.chain([turn.content.as_str()])
    });
    // A secret is the graver find, so all is looked through before personal data counts.
    let found: Vec<(Kind, &str)> = said.flat_map(patterns::find).collect();
    if let Some((_, by)) = found.iter().find(|(kind, _)| *kind == Kind::Secret) {
        return Ok(secret.because("secret", holds_secret).label("by", by));
    }
    if let Some((_, by)) = found.first() {
        return Ok(private.because("private", stays).label("by", by));
    }
    let key = format!("private:{}", request.conversation_key());
    if store::get(&key).is_some() {
        return Ok(private.because("private-before", stays).label("by", "store"));
    }
    let asked = session.decide([
        boolean("Does the last message contain personal data of an identifiable person?")
            .probe("personal-data"),
        boolean("Does the last message contain a password, a key or another secret in plain text?"),
    ]);
    let [personal, hidden] = match asked {
        Ok(answers) => answers,
        Err(error) => return Ok(on_failure.after(&error)),
    };
    // Label reads are not calibrated, so less of them is enough to stay.
    let bar = if personal.rung == Rung::Probe { private_at } else { labels_at.min(private_at) };
    let routing = if hidden.yes >= secret_at && hidden.mass >= UNSURE_BELOW {
        remember(&key, keep);
        secret.because("secret", holds_secret).label("by", "question")
    } else if personal.yes >= bar {
        remember(&key, keep);
        private.because("private", stays).label("by", "question")
    } else if personal.mass < UNSURE_BELOW {
        private.because("unsure", stays).label("by", "mass")
    } else {
        elsewhere.because("public", "No upstream takes this request.")
    };
    Ok(routing.figure("personal", personal.yes).figure("secret", hidden.yes).figure("mass", personal.mass))
}

/// What was judged private once is not judged anew when the user speaks of something else: it is still in the history.
fn remember(key: &str, keep: Duration) {
    if let Err(error) = store::set(key, b"1", Some(keep)) {
        warn(&error.to_string());
    }
}
