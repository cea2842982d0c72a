//! Judges a command before it runs: the call of a shell tool that the model has just proposed, or, where there is
//! none, what the user asks for.
//!
//! Commands that destroy by their very text are refused and plain reads are let through, both without asking. For
//! the rest one step asks how bad and whether it can be undone. Whatever is not refused goes to the next policy
//! of the chain. The same policy in C lies beside this one.
//!
//! Configuration: `tools`, the names of shell tools with commas between (default: `bash,shell,sh,exec,terminal`);
//! `deny-at`, the probability of harm that refuses (default: 0.8).

mod rules;

use forkpoint_policy::*;

/// A command longer than this is not judged but refused: what cannot be read cannot be trusted.
const LONGEST: usize = 4000;

#[policy]
fn route(request: &Request, session: &Session) -> Result<Routing> {
    let tools = config("tools").unwrap_or_else(|| "bash,shell,sh,exec,terminal".to_owned());
    let deny_at = config_or("deny-at", 0.8)?;
    let is_shell = |call: &&ToolCall| tools.split(',').any(|tool| tool.trim() == call.name);
    let calls: Vec<&ToolCall> = request.pending_calls().into_iter().filter(is_shell).collect();
    if calls.is_empty() {
        let text = request.last_user();
        if rules::orders_destruction(text) {
            return Ok(reject(403, "shell-risk", "The command destroys data; ask a person."));
        }
        return judge(
            session,
            "what the user's last message asks for",
            if rules::destroys(text) { deny_at / 2.0 } else { deny_at },
        );
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
