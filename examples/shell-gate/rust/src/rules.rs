//! What a command's text says by itself.

/// Parts of commands that destroy whatever surrounds them.
const DESTROYS: [&str; 12] = [
    "rm -rf /",
    "rm -fr /",
    "rm -rf ~",
    "rm -rf *",
    "--no-preserve-root",
    "mkfs",
    "wipefs",
    "of=/dev/",
    "> /dev/sd",
    ":(){",
    "drop database",
    "shred ",
];

/// Commands that only read, as long as nothing follows them.
const READS: [&str; 10] = ["ls", "cat", "pwd", "head", "tail", "wc", "grep", "stat", "whoami", "git status"];

/// Signs that chain, redirect or substitute: behind them may stand anything.
const JOINS: [char; 9] = [';', '|', '&', '>', '<', '`', '$', '\n', '\\'];

/// Whether the text holds a command that destroys: spaces counted once, letters in any case, and backslashes left
/// out, since JSON and shells both let them stand before letters that need none.
pub(crate) fn destroys(text: &str) -> bool {
    let bare = text.replace('\\', "");
    let words: Vec<&str> = bare.split_whitespace().collect();
    let plain = words.join(" ").to_lowercase();
    DESTROYS.iter().any(|part| plain.contains(part))
}

/// Whether a short text orders what destroys. A long one may quote it, in a log or a file, and one that asks about it
/// does no harm: both are left to the questions.
pub(crate) fn orders_destruction(text: &str) -> bool {
    const ASKS: [&str; 6] = ["explain", "what", "why", "how", "describe", "tell me"];
    let start = text.trim_start().to_lowercase();
    text.len() <= 200 && destroys(text) && !ASKS.iter().any(|word| start.starts_with(word))
}

/// Whether a tool call's arguments, `{"command": "…"}` and nothing else, hold one command that only reads.
pub(crate) fn only_reads(arguments: &str) -> bool {
    let Some(command) = sole_command(arguments) else { return false };
    let reads = |known: &&str| {
        command == *known || command.strip_prefix(*known).is_some_and(|rest| rest.starts_with(' '))
    };
    !command.contains(JOINS) && READS.iter().any(|known| reads(&known))
}

/// The string of the only field, `command` or `cmd`. Escapes are left as they are: a backslash is in [`JOINS`].
fn sole_command(arguments: &str) -> Option<&str> {
    let inside = arguments.trim().strip_prefix('{')?.strip_suffix('}')?.trim();
    let (name, value) = inside.split_once(':')?;
    if !matches!(name.trim(), "\"command\"" | "\"cmd\"") {
        return None;
    }
    let text = value.trim().strip_prefix('"')?.strip_suffix('"')?;
    // A quote inside would end the string early, and more fields might follow it.
    (!text.contains('"')).then_some(text.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destruction_is_seen_through_spaces_and_case() {
        assert!(destroys(r#"{"command":"sudo  RM   -rf /var"}"#));
        assert!(destroys(r#"{"command":"rm -rf \/"}"#));
        assert!(destroys("dd if=/dev/zero of=/dev/sda"));
        assert!(!destroys("rm notes.txt"));
    }

    #[test]
    fn an_order_is_short_and_no_question() {
        assert!(orders_destruction("Run rm -rf / now"));
        assert!(!orders_destruction("What does rm -rf / do?"));
        assert!(!orders_destruction(&format!("{} rm -rf /", "log ".repeat(60))));
    }

    #[test]
    fn only_a_single_plain_command_is_taken_for_a_read() {
        assert!(only_reads(r#"{"command": "ls -la /tmp"}"#));
        assert!(only_reads(r#"{"cmd":"git status"}"#));
        for bad in [
            r#"{"command": "ls; rm x"}"#,
            r#"{"command": "cat a > b"}"#,
            r#"{"command": "lsblk"}"#,
            r#"{"command": "ls", "then": "rm x"}"#,
            r#"{"command": "ls $(rm x)"}"#,
            "{\"command\": \"ls\\u003b rm x\"}",
            "ls",
        ] {
            assert!(!only_reads(bad), "{bad}");
        }
    }
}
