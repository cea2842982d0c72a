//! Looks at what a request wants and prepares the reply for it: the policy of the quick start.
//!
//! Free rules first: tool results go straight on, greetings and thanks get a canned reply, and words that leave no
//! doubt say what is wanted. Then one choice on the warm session, where they did not, and by what is wanted a
//! yes-or-no question and a score in one more step. Small models misjudge, so
//! an answer alone refuses only when it is sure, and what looks dangerous by its text lowers that bar: each step
//! can only make the outcome stricter.
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

/// How sure an answer must be to refuse by itself, and how sure beside a text that is dangerous already.
const REFUSE_AT: f64 = 0.85;
const REFUSE_SUSPECT_AT: f64 = 0.4;

/// Below this mass the model did not take the question for one.
const UNSURE_BELOW: f64 = 0.02;

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
    if suspect || contains_any(&lower, &SHELL) {
        return Ok(shell(request, session, suspect)?.label("by", "rule"));
    }
    if contains_any(&lower, &CODE) {
        return Ok(code(session)?.label("by", "rule"));
    }
    let wants = session.ask(choice(
        "What does the user's last message ask for?",
        [
            ("talk", "conversation, facts or advice"),
            ("text", "a text to be written, translated or summarised"),
            ("code", "program code to be written, explained or mended"),
            ("shell", "commands to be run on this computer, or files to be changed or deleted"),
        ],
    ))?;
    let routing = if wants.is("shell") {
        shell(request, session, false)?
    } else if wants.mass < UNSURE_BELOW {
        generate().because("unsure")
    } else if wants.is("code") {
        code(session)?
    } else {
        generate().because(wants.top())
    };
    Ok(routing.label("wants", wants.top()).label("confidence", format!("{:.2}", wants.confidence)))
}

fn shell(request: &Request, session: &Session, suspect: bool) -> Result<Routing> {
    let [loses, harm] = session.decide([
        boolean("Would doing what the user's last message asks delete or overwrite data?")
            .sides("data would be lost", "nothing would be lost, or it only asks for an explanation"),
        score("How much harm could doing it cause on this computer?", ["none", "little", "serious"]),
    ])?;
    let bar = if suspect { REFUSE_SUSPECT_AT } else { REFUSE_AT };
    if loses.yes >= bar && (suspect || harm.level >= 1.5) {
        return Ok(reject(403, "shell-risk", "This could destroy data; ask a person to do it.")
            .label("loses", format!("{:.2}", loses.yes))
            .label("harm", format!("{:.2}", harm.level)));
    }
    let careful =
        "Prefer commands that only read. Before one that changes anything, say what it will change.";
    let plan = generate().system(careful);
    // A tool that nobody has is not a plan, so the default counts only where the client offers it.
    let tool = config("shell-tool").or_else(|| request.tool("bash").map(|tool| tool.name.clone()));
    Ok(match tool {
        Some(tool) => plan.mount([tool]).because("needs-shell"),
        None => plan.because("shell-advice"),
    })
}

fn code(session: &Session) -> Result<Routing> {
    let [mends, hard] = session.decide([
        boolean("Does the user's last message ask to change code that exists already?"),
        score("How hard is this programming task?", ["easy", "medium", "hard"]),
    ])?;
    let mut plan = generate();
    if mends.yes > 0.5 {
        plan = plan.system("Change as little of the existing code as the request needs.");
    }
    if hard.level >= 1.5 {
        plan = plan.system("Name the hard part and the edge cases before you write code.");
    }
    Ok(plan.because("code").label("hard", format!("{:.2}", hard.level)))
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
