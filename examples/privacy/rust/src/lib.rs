//! Keeps what is private here: requests that hold personal data or secrets are answered by the model in this process,
//! and only the rest may leave.
//!
//! Free rules first: mail addresses, IBANs, card and telephone numbers, keys and tokens are found by their form, in all
//! that was said and called, since all of it would leave. What has no form is asked about in one step: personal data of
//! a probe that knows the like, secrets and tool results of the model. Doubt keeps a request here, and a conversation
//! that was found private or in doubt stays private.
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
    let header = config("tenant-header").unwrap_or_else(|| "x-tenant".into());
    let memory = Memory::of(request.conversation_key(request.filled_header(&header)), keep);
    if memory.holds() {
        return Ok(private.because("private-before", stays).label("by", "store"));
    }
    let answers = match session.decide_all(&questions(request)) {
        Ok(answers) => answers,
        // Nobody looked at this turn, and the next request would send it along.
        Err(error) => {
            let kept = memory.keep();
            return Ok(if kept { on_failure } else { private }.after(&error).label("store", note(kept)));
        }
    };
    let [personal, hidden] = [&answers[0], &answers[1]];
    // Label reads are not calibrated, so less of them is enough to stay.
    let labels_at = labels_at.min(private_at);
    let bar = if personal.rung == Rung::Probe { private_at } else { labels_at };
    let in_results = answers.get(2).is_some_and(|results| results.yes >= labels_at);
    let mass = answers.iter().map(|answer| answer.mass).fold(1.0, f64::min);
    let figures = |routing: Routing| {
        let routing =
            routing.figure("personal", personal.yes).figure("secret", hidden.yes).figure("mass", mass);
        match answers.get(2) {
            Some(results) => routing.figure("results", results.yes),
            None => routing,
        }
    };
    let (outcome, reason, message, by) = if hidden.yes >= secret_at && hidden.mass >= UNSURE_BELOW {
        (&secret, "secret", holds_secret, "question")
    } else if personal.yes >= bar {
        (&private, "private", stays, "question")
    } else if in_results {
        (&private, "private", stays, "results")
    } else if mass < UNSURE_BELOW {
        (&private, "unsure", stays, "mass")
    } else if request.messages.iter().filter(|turn| turn.role == Role::User).count() > 1 && !memory.has_room()
    {
        // What is not known may have been refused a place in the store.
        return Ok(figures(private.because("unsure", stays).label("by", "store")));
    } else {
        return Ok(figures(elsewhere.because("public", "No upstream takes this request.")));
    };
    let kept = memory.keep();
    Ok(figures(outcome.because(reason, message).label("by", by).label("store", note(kept))))
}

/// What no pattern knows. The probe reads the user's last turn, so what tools have answered since is a question of its
/// own.
fn questions(request: &Request) -> Vec<Question> {
    let mut questions = vec![
        boolean("Does the last message contain personal data of an identifiable person?")
            .probe("personal-data"),
        boolean("Does the last message contain a password, a key or another secret in plain text?"),
    ];
    let answered = |turn: &Message| turn.role == Role::Tool && !turn.content.trim().is_empty();
    if request.since_user().iter().any(answered) {
        questions.push(boolean("Do the last tool results contain personal data of an identifiable person?"));
    }
    questions
}

/// What was judged private or in doubt once is not judged anew when the user speaks of something else: it is still in
/// the history.
struct Memory {
    key: String,
    keep: Duration,
}

impl Memory {
    fn of(conversation: String, keep: Duration) -> Self {
        Self { key: format!("private:{conversation}"), keep }
    }

    fn holds(&self) -> bool {
        store::get(&self.key).is_some()
    }

    fn keep(&self) -> bool {
        self.write(&self.key, self.keep)
    }

    /// Whether the store would take one more conversation: tried with a longer key, which ends by itself.
    fn has_room(&self) -> bool {
        self.write(&format!("room-for-{}", self.key), Duration::from_secs(1))
    }

    fn write(&self, key: &str, keep: Duration) -> bool {
        let written = store::set(key, b"1", Some(keep));
        if let Err(error) = &written {
            warn(&error.to_string());
        }
        written.is_ok()
    }
}

fn note(kept: bool) -> &'static str {
    if kept { "ok" } else { "full" }
}
