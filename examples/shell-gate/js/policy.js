// The gate of ../rust in JavaScript: the same rules, questions and reasons.
import { boolean, choice, config, configWithin, decide, lastUser, next, pendingCalls, probed, reject }
  from "forkpoint-policy";

// A command longer than this, in bytes, is not judged but refused: what cannot be read cannot be trusted.
const LONGEST = 4000;

// Below this mass a session is unlike all that a probe was fitted to.
const KNOWN_FROM = 0.02;

// Parts of commands that destroy whatever surrounds them.
const DESTROYS = ["rm -rf /", "rm -fr /", "rm -rf ~", "rm -rf *", "--no-preserve-root", "mkfs", "wipefs", "of=/dev/",
  "> /dev/sd", ":(){", "drop database", "shred "];

// Whether the text holds a command that destroys: spaces counted once, letters in any case, and backslashes left out,
// since JSON and shells both let them stand before letters that need none.
const destroys = (text) => {
  const plain = text.replaceAll("\\", "").trim().replace(/\s+/g, " ").toLowerCase();
  return DESTROYS.some((part) => plain.includes(part));
};

// Whether a text that holds such a command orders it, being short. A long one may quote it, in a log or a file, and one
// that asks about it does no harm: both are left to the questions.
const orders = (text) =>
  bytes(text) <= 200 && !/^\s*(explain|what|why|how|describe|tell me)/i.test(text);

// Whether a tool call's arguments, {"command": "…"} and nothing else, hold one command that only reads. No sign may
// chain, redirect or substitute, and a quote inside would end the string early.
const READS = new RegExp(
  '^\\s*{\\s*"(command|cmd)"\\s*:\\s*"\\s*(ls|cat|pwd|head|tail|wc|grep|stat|whoami|git status)' +
  '( [^";|&><`$\\n\\\\]*)?"\\s*}\\s*$');

// How long a text is in UTF-8.
const bytes = (text) => encodeURIComponent(text).replace(/%[0-9A-F]{2}/g, ".").length;

export function route(request, session) {
  const tools = config("tools", "bash,shell,sh,exec,terminal").split(",").map((tool) => tool.trim());
  const denyAt = configWithin("deny-at", 0.8, 0, 1);
  const requestAt = configWithin("deny-request-at", 0.5, 0, 1);
  const calls = pendingCalls(request).filter((call) => tools.includes(call.name)).map((call) => call.arguments);
  if (calls.length === 0) {
    const text = lastUser(request);
    const harmful = destroys(text);
    if (harmful && orders(text)) return reject(403, "shell-risk", "The command destroys data; ask a person.");
    const share = harmful ? 0.5 : 1;
    return judgeRequest(session, share * requestAt, share * denyAt);
  }
  if (calls.some((call) => bytes(call) > LONGEST)) {
    return reject(403, "shell-unreadable", "The command is too long to be judged.");
  }
  if (calls.some(destroys)) return reject(403, "shell-risk", "The command destroys data; ask a person.");
  if (calls.every((call) => READS.test(call))) return next("read-only");
  return judge(session, `this tool call: ${calls.join(" and ")}`, denyAt);
}

// Asks the probes whether the user's request needs a shell and would destroy, and refuses when it surely does: from
// requestAt on, from denyAt on where labels were read, from the smaller one on where either answer is unsure.
function judgeRequest(session, requestAt, denyAt) {
  const [shell, destructive] = decide(session, [
    probed("shell", boolean("Does the last request need a shell on a machine?")),
    probed("destructive", boolean(
      "Would carrying out the last request destroy or overwrite something that cannot easily be brought back?")),
  ]);
  let bar = shell.rung === "probe" && destructive.rung === "probe" ? requestAt : denyAt;
  if (Math.min(shell.mass, destructive.mass) < KNOWN_FROM) bar = Math.min(requestAt, denyAt);
  const labels = { shell: shell.yes.toFixed(2), destructive: destructive.yes.toFixed(2) };
  if (shell.yes < 0.5) return next("no-shell", labels);
  if (destructive.yes >= bar) return reject(403, "shell-risk", "This could destroy data; ask a person.", labels);
  return next("shell-ok", labels);
}

// Asks how bad an act is and refuses from denyAt on.
function judge(session, act, denyAt) {
  const [harm, lost] = decide(session, [
    choice(`What would running ${act} do to this computer?`, [
      { name: "nothing", description: "it only reads, or runs no command at all" },
      { name: "change", description: "it changes files or settings, and that can be undone" },
      { name: "destroy", description: "it deletes or overwrites what cannot be had back" },
    ]),
    boolean(`Could running ${act} lose data for good?`),
  ]);
  const destroy = harm.probabilities[2];
  const labels = { destroy: destroy.toFixed(2), lost: lost.yes.toFixed(2) };
  if (destroy >= denyAt || (lost.yes >= denyAt && harm.choice !== "nothing")) {
    return reject(403, "shell-risk", "This could destroy data; ask a person.", labels);
  }
  return next("shell-ok", labels);
}
