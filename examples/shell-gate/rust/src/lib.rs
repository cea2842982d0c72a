//! Judges a command before it runs: the call of a shell tool that the model has just proposed, or, where there is
//! none, what the user asks for.
//!
//! Commands that destroy by their very text are refused and plain reads are let through, both without asking. What
//! a user asks for is judged by two probes, `shell` and `destructive`, which cost no token; of any other command one
//! step asks how bad it is and whether it can be undone. Whatever is not refused goes to the next policy of the
//! chain. The same policy in C lies beside this one.
//!
//! Configuration: `tools`, the names of shell tools with commas between (default: `bash,shell,sh,exec,terminal`);
//! `deny-at`, the probability of harm by a command that refuses it (default: 0.8); `deny-request-at`, that by a
//! user's request (default: 0.5: the probes' probabilities are calibrated).

mod rules;

use forkpoint_policy::*;

/// A command longer than this is not judged but refused: what cannot be read cannot be trusted.
const LONGEST: usize = 4000;

/// Below this mass a session is unlike all that a probe was fitted to.
const KNOWN_FROM: f64 = 0.02;

#[policy]
fn route(request: &Request, session: &Session) -> Result<Routing> {
    let tools = config_list("tools", "bash,shell,sh,exec,terminal");
    let deny_at: f64 = config_within("deny-at", 0.8, 0.0..=1.0)?;
    let deny_request_at: f64 = config_within("deny-request-at", 0.5, 0.0..=1.0)?;
    let is_shell = |call: &&ToolCall| tools.contains(&call.name);
    let calls: Vec<&ToolCall> = request.pending_calls().into_iter().filter(is_shell).collect();
    if calls.is_empty() {
        let text = request.last_user();
        if rules::orders_destruction(text) {
            return Ok(reject(403, "shell-risk", "The command destroys data; ask a person."));
        }
        let share = if rules::destroys(text) { 0.5 } else { 1.0 };
        return judge_request(session, share * deny_request_at, share * deny_at);
    }
    if calls.iter().any(|call| call.arguments.len() > LONGEST) {
        return Ok(reject(403, "shell-unreadable", "The command is too long to be judged."));
    }
    if calls.iter().any(|call| rules::destroys(&call.arguments)) {
        return Ok(reject(403, "shell-risk", "The command destroys data; ask a person."));
    }
    if calls.iter().all(|call| rules::only_reads(&call.arguments)) {
        return Ok(next().because("read-only"));
    }
    let commands: Vec<&str> = calls.iter().map(|call| call.arguments.as_str()).collect();
    judge(session, &format!("this tool call: {}", commands.join(" and ")), deny_at)
}

/// Asks the probes whether the user's request needs a shell and would destroy, and refuses when it surely does:
/// from `deny_at` on where probes answer that know the like, from `labels_at` on where labels were read. Of a text that
/// is unlike all that a probe knows neither can be trusted, so the lower bar holds: a strange text has no easier way.
fn judge_request(session: &Session, deny_at: f64, labels_at: f64) -> Result<Routing> {
    let [shell, destructive] = session.decide([
        boolean("Does the last request need a shell on a machine?").probe("shell"),
        boolean(
            "Would carrying out the last request destroy or overwrite something that cannot easily be brought back?",
        )
        .probe("destructive"),
    ])?;
    let by_probes = [&shell, &destructive].iter().all(|answer| answer.rung == Rung::Probe);
    let strange = [&shell, &destructive].iter().any(|answer| answer.mass < KNOWN_FROM);
    let bar = match (strange, by_probes) {
        (true, _) => deny_at.min(labels_at),
        (false, true) => deny_at,
        (false, false) => labels_at,
    };
    let routing = if !shell.is("yes") {
        next().because("no-shell")
    } else if destructive.yes >= bar {
        reject(403, "shell-risk", "This could destroy data; ask a person.")
    } else {
        next().because("shell-ok")
    };
    Ok(routing
        .label("shell", format!("{:.2}", shell.yes))
        .label("destructive", format!("{:.2}", destructive.yes)))
}

/// Asks how bad `act` is and refuses from `deny_at` on.
fn judge(session: &Session, act: &str, deny_at: f64) -> Result<Routing> {
    let [harm, lost] = session.decide([
        choice(
            format!("What would running {act} do to this computer?"),
            [
                ("nothing", "it only reads, or runs no command at all"),
                ("change", "it changes files or settings, and that can be undone"),
                ("destroy", "it deletes or overwrites what cannot be had back"),
            ],
        ),
        boolean(format!("Could running {act} lose data for good?")),
    ])?;
    let destroy = harm.probability("destroy");
    let routing = if destroy >= deny_at || (lost.yes >= deny_at && !harm.is("nothing")) {
        reject(403, "shell-risk", "This could destroy data; ask a person.")
    } else {
        next().because("shell-ok")
    };
    Ok(routing.label("destroy", format!("{destroy:.2}")).label("lost", format!("{:.2}", lost.yes)))
}
