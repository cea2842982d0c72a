"""The gate of ../rust in Python: the same rules, questions and reasons. rules.py says what a command's text says."""

import rules
from forkpoint_policy import (
    Rung, boolean, choice, config, config_within, decide, last_user, next_policy, pending_calls, policy, probed, reject,
)

# A command longer than this, in bytes, is not judged but refused: what cannot be read cannot be trusted.
LONGEST = 4000

# Below this mass a session is unlike all that a probe was fitted to.
KNOWN_FROM = 0.02


@policy
def route(request, session):
    tools = [tool.strip() for tool in config("tools", "bash,shell,sh,exec,terminal").split(",")]
    deny_at = config_within("deny-at", 0.8, 0, 1)
    request_at = config_within("deny-request-at", 0.5, 0, 1)
    calls = [call.arguments for call in pending_calls(request) if call.name in tools]
    if not calls:
        text = last_user(request)
        if rules.orders_destruction(text):
            return reject(403, "shell-risk", "The command destroys data; ask a person.")
        share = 0.5 if rules.destroys(text) else 1.0
        return judge_request(session, share * request_at, share * deny_at)
    if any(len(call.encode()) > LONGEST for call in calls):
        return reject(403, "shell-unreadable", "The command is too long to be judged.")
    if any(rules.destroys(call) for call in calls):
        return reject(403, "shell-risk", "The command destroys data; ask a person.")
    if all(rules.only_reads(call) for call in calls):
        return next_policy("read-only")
    return judge(session, f"this tool call: {' and '.join(calls)}", deny_at)


def judge_request(session, request_at, deny_at):
    """Asks the probes whether the user's request needs a shell and would destroy, and refuses when it surely does: from
    `request_at` on, from `deny_at` on where labels were read, from the smaller one on where either answer is
    unsure."""
    shell, destructive = decide(session, [
        probed("shell", boolean("Does the last request need a shell on a machine?")),
        probed("destructive", boolean(
            "Would carrying out the last request destroy or overwrite something that cannot easily be brought back?")),
    ])
    bar = request_at if shell.rung == destructive.rung == Rung.PROBE else deny_at
    if min(shell.mass, destructive.mass) < KNOWN_FROM:
        bar = min(request_at, deny_at)
    labels = {"shell": f"{shell.yes:.2f}", "destructive": f"{destructive.yes:.2f}"}
    if shell.yes < 0.5:
        return next_policy("no-shell", labels)
    if destructive.yes >= bar:
        return reject(403, "shell-risk", "This could destroy data; ask a person.", labels)
    return next_policy("shell-ok", labels)


def judge(session, act, deny_at):
    """Asks how bad `act` is and refuses from `deny_at` on."""
    harm, lost = decide(session, [
        choice(f"What would running {act} do to this computer?", [
            ("nothing", "it only reads, or runs no command at all"),
            ("change", "it changes files or settings, and that can be undone"),
            ("destroy", "it deletes or overwrites what cannot be had back"),
        ]),
        boolean(f"Could running {act} lose data for good?"),
    ])
    destroy = harm.probabilities[2]
    labels = {"destroy": f"{destroy:.2f}", "lost": f"{lost.yes:.2f}"}
    if destroy >= deny_at or (lost.yes >= deny_at and harm.choice != "nothing"):
        return reject(403, "shell-risk", "This could destroy data; ask a person.", labels)
    return next_policy("shell-ok", labels)
