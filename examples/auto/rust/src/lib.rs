//! Looks at what a request wants and prepares the reply for it: the policy of the quick start.
//!
//! Free rules first: tool results go straight on, greetings and thanks get a canned reply, and words that leave no
//! doubt say what is wanted. The rest is asked of four probes, which read it off the warm session and cost no token:
//! does it need a shell, would it destroy something, what does it want back, how demanding is it. Words that look
//! dangerous only lower the bar: each step can only make the outcome stricter.
//!
//! Configuration: `shell-tool`, the tool to mount for shell work (default: `bash`, where the client offers it).

use forkpoint_policy::*;

/// What reads as work that cannot be undone. A match refuses nothing by itself: someone may ask what it means.
const DANGEROUS: [&str; 9] =
    ["rm -rf", "rm -fr", "mkfs", "dd if=", "of=/dev/", "wipefs", ":(){", "delete everything", "delete all"];

/// What leaves no doubt that commands are to be run, or that code is wanted.
const SHELL: [&str; 7] = [
    "run the ",
    "execute ",
    "in the terminal",
    "list the files",
    "list my files",
    "kill the process",
    "disk space",
];
const CODE: [&str; 8] =
    ["```", "python", "javascript", " rust ", "sql query", "stack trace", "compile error", "unit test"];

/// From what probability of destruction on a request for a shell is refused, and beside a text that is dangerous
/// already, by probes that know the like.
const REFUSE_AT: f64 = 0.5;
const REFUSE_SUSPECT_AT: f64 = 0.2;

/// The same where they do not, or labels were read: those are not calibrated.
const REFUSE_UNSURE_AT: f64 = 0.85;
const REFUSE_UNSURE_SUSPECT_AT: f64 = 0.4;

/// Below this mass the session is unlike all that the probes know, and their answers mean little.
const UNSURE_BELOW: f64 = 0.02;

/// From which level on a task is demanding: 2 of trivial, simple, demanding and expert.
const DEMANDING: f64 = 1.5;

#[policy]
fn route(request: &Request, session: &Session) -> Result<Routing> {
    if request.messages.last().is_none_or(|turn| turn.role == Role::Tool) {
        return Ok(generate().because("tool-result"));
    }
    let text = request.last_user();
    if let Some(canned) = small_talk(text) {
        return Ok(reply(canned).because("small-talk"));
    }
    let lower = text.to_lowercase();
    let suspect = !asks_about(&lower) && contains_any(&lower, &DANGEROUS);
    let [shell, destructive, output, difficulty] = session.decide([
        boolean("Does the last request need a shell on a machine?").probe("shell"),
        boolean(
            "Would carrying out the last request destroy or overwrite something that cannot easily be brought back?",
        )
        .probe("destructive"),
        choice("What does the last request want back?", ["code", "prose", "data"]).probe("output"),
        score("How demanding is the last request for a language model?", [
            "trivial",
            "simple",
            "demanding",
            "expert",
        ])
        .probe("difficulty"),
    ])?;
    let hard = difficulty.level >= DEMANDING;
    let by_rule = suspect || contains_any(&lower, &SHELL);
    let routing = if by_rule || shell.is("yes") {
        let known = [&shell, &destructive]
            .iter()
            .all(|answer| answer.rung == Rung::Probe && answer.mass >= UNSURE_BELOW);
        let bar = match (known, suspect) {
            (true, true) => REFUSE_SUSPECT_AT,
            (true, false) => REFUSE_AT,
            (false, true) => REFUSE_UNSURE_SUSPECT_AT,
            (false, false) => REFUSE_UNSURE_AT,
        };
        if destructive.yes >= bar {
            reject(403, "shell-risk", "This could destroy data; ask a person to do it.")
        } else {
            mount_shell(request)
        }
    } else if contains_any(&lower, &CODE) || output.is("code") {
        code(hard)
    } else if output.mass < UNSURE_BELOW {
        generate().because("unsure")
    } else {
        generate().because(output.top())
    };
    Ok(routing
        .label("shell", format!("{:.2}", shell.yes))
        .label("destructive", format!("{:.2}", destructive.yes))
        .label("output", output.top())
        .label("difficulty", format!("{:.2}", difficulty.level)))
}

fn mount_shell(request: &Request) -> Routing {
    let careful =
        "Prefer commands that only read. Before one that changes anything, say what it will change.";
    let plan = generate().system(careful);
    // A tool that nobody has is not a plan, so the default counts only where the client offers it.
    let tool = config("shell-tool").or_else(|| request.tool("bash").map(|tool| tool.name.clone()));
    match tool {
        Some(tool) => plan.mount([tool]).because("needs-shell"),
        None => plan.because("shell-advice"),
    }
}

fn code(hard: bool) -> Routing {
    let plan = generate();
    let plan =
        if hard { plan.system("Name the hard part and the edge cases before you write code.") } else { plan };
    plan.because("code")
}

/// Whether the text, in lower case, asks about something rather than for it to be done.
fn asks_about(text: &str) -> bool {
    const ASKS: [&str; 6] = ["explain", "what", "why", "how", "describe", "tell me"];
    ASKS.iter().any(|word| text.trim_start().starts_with(word))
}

fn contains_any(text: &str, parts: &[&str]) -> bool {
    parts.iter().any(|part| text.contains(part))
}

/// The reply to a message that is a greeting or thanks and nothing else.
fn small_talk(text: &str) -> Option<&'static str> {
    const GREETINGS: [&str; 8] =
        ["hi", "hello", "hey", "hi there", "hello there", "good morning", "good afternoon", "good evening"];
    const THANKS: [&str; 6] =
        ["thanks", "thank you", "thanks a lot", "thank you very much", "many thanks", "thx"];
    let said = text.trim().trim_end_matches(['.', '!', ',', ' ']).to_lowercase();
    if GREETINGS.contains(&said.as_str()) {
        Some("Hello! What can I do for you?")
    } else if THANKS.contains(&said.as_str()) {
        Some("You are welcome.")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::{asks_about, small_talk};

    #[test]
    fn only_bare_small_talk_is_canned() {
        assert!(small_talk("Hello!").unwrap().starts_with("Hello"));
        assert_eq!(small_talk(" Thank you very much. "), Some("You are welcome."));
        assert_eq!(small_talk("hello world in C, please"), None);
        assert_eq!(small_talk("Hi?"), None);
        assert_eq!(small_talk(""), None);
    }

    #[test]
    fn to_ask_about_a_command_is_not_to_ask_for_it() {
        assert!(asks_about("what does rm -rf do?"));
        assert!(!asks_about("please run rm -rf /"));
    }
}
