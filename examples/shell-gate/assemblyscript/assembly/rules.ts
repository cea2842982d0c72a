// What a command's text says by itself. The lists are those of ../../rust/src/rules.rs.

const DESTROYS = ["rm -rf /", "rm -fr /", "rm -rf ~", "rm -rf *", "--no-preserve-root", "mkfs", "wipefs", "of=/dev/",
  "> /dev/sd", ":(){", "drop database", "shred "];
const ASKS = ["explain", "what", "why", "how", "describe", "tell me"];
const READS = ["ls", "cat", "pwd", "head", "tail", "wc", "grep", "stat", "whoami", "git status"];
// Signs that chain, redirect or substitute, and the quote that would end the string early.
const JOINS = ["\"", ";", "|", "&", ">", "<", "`", "$", "\n", "\\"];

// Whether the text holds a command that destroys: spaces counted once, letters in any case, and backslashes left out,
// since JSON and shells both let them stand before letters that need none.
export function destroys(text: string): bool {
  let plain = "";
  for (let i = 0; i < text.length; i++) {
    const c = text.charCodeAt(i);
    if (c == 92) continue;
    if (c != 32 && (c < 9 || c > 13)) plain += text.charAt(i);
    else if (plain.length > 0 && !plain.endsWith(" ")) plain += " ";
  }
  plain = plain.trimEnd().toLowerCase();
  for (let i = 0; i < DESTROYS.length; i++) if (plain.includes(DESTROYS[i])) return true;
  return false;
}

// Whether a short text orders what destroys. A long one may quote it, in a log or a file, and one that asks about it
// does no harm: both are left to the questions.
export function ordersDestruction(text: string): bool {
  if (String.UTF8.byteLength(text) > 200 || !destroys(text)) return false;
  const start = text.trimStart().toLowerCase();
  for (let i = 0; i < ASKS.length; i++) if (start.startsWith(ASKS[i])) return false;
  return true;
}

// Whether a tool call's arguments, {"command": "…"} and nothing else, hold one command that only reads.
export function onlyReads(text: string): bool {
  const inside = between(text.trim(), "{", "}");
  if (inside === null) return false;
  const colon = inside.indexOf(":");
  if (colon < 0) return false;
  const name = inside.substring(0, colon).trim();
  if (name != "\"command\"" && name != "\"cmd\"") return false;
  const quoted = between(inside.substring(colon + 1).trim(), "\"", "\"");
  if (quoted === null) return false;
  for (let i = 0; i < JOINS.length; i++) if (quoted.includes(JOINS[i])) return false;
  const command = quoted.trim();
  for (let i = 0; i < READS.length; i++) if (command == READS[i] || command.startsWith(READS[i] + " ")) return true;
  return false;
}

// The text between two signs that stand at its ends.
function between(text: string, first: string, last: string): string | null {
  if (text.length < 2 || !text.startsWith(first) || !text.endsWith(last)) return null;
  return text.substring(1, text.length - 1);
}
