//! The gate of ../rust in Zig: the same rules, questions and reasons. rules.zig says what a command's text says by
//! itself.

const std = @import("std");
const fp = @import("forkpoint");
const rules = @import("rules.zig");

/// A command longer than this is not judged but refused: what cannot be read cannot be trusted.
const longest = 4000;

/// Below this mass a session is unlike all that a probe was fitted to.
const known_from = 0.02;

comptime {
    fp.policy(route);
}

fn route(request: *const fp.Request, session: fp.Session) fp.Error!fp.Routing {
    const tools = fp.config("tools", "bash,shell,sh,exec,terminal");
    const deny_at = try fp.configWithin("deny-at", 0.8, 0, 1);
    const request_at = try fp.configWithin("deny-request-at", 0.5, 0, 1);
    var commands: []const u8 = "";
    var pending: usize = 0;
    var unreadable = false;
    var destroys = false;
    var only_reads = true;
    for (request.pendingCalls()) |call| {
        if (!rules.listed(tools, call.name.slice())) continue;
        const arguments = call.arguments.slice();
        unreadable = unreadable or arguments.len > longest;
        destroys = destroys or rules.destroys(arguments);
        only_reads = only_reads and rules.onlyReads(arguments);
        commands = fp.join(&.{ commands, if (pending > 0) " and " else "", arguments });
        pending += 1;
    }
    if (pending == 0) {
        const text = request.lastUser();
        if (rules.ordersDestruction(text)) return destroying();
        const share: f64 = if (rules.destroys(text)) 0.5 else 1;
        return judgeRequest(session, share * request_at, share * deny_at);
    }
    if (unreadable) return fp.reject(403, "shell-unreadable", "The command is too long to be judged.");
    if (destroys) return destroying();
    if (only_reads) return fp.next("read-only");
    return judge(session, fp.join(&.{ "this tool call: ", commands }), deny_at);
}

/// Asks the probes whether the user's request needs a shell and would destroy, and refuses when it surely does: from
/// `request_at` on, from `deny_at` on where labels were read, from the smaller one on where either answer is unsure.
fn judgeRequest(session: fp.Session, request_at: f64, deny_at: f64) fp.Error!fp.Routing {
    const answers = try session.decide(&.{
        fp.boolean("Does the last request need a shell on a machine?").probed("shell"),
        fp.boolean("Would carrying out the last request destroy or overwrite something " ++
            "that cannot easily be brought back?").probed("destructive"),
    });
    var bar = if (answers[0].rung == .probe and answers[1].rung == .probe) request_at else deny_at;
    if (@min(answers[0].mass, answers[1].mass) < known_from) bar = @min(request_at, deny_at);
    const shell = answers[0].yes();
    const destructive = answers[1].yes();
    const routing = if (shell < 0.5) fp.next("no-shell") else if (destructive >= bar) refuse() else fp.next("shell-ok");
    return routing.label("shell", fp.fixed(shell)).label("destructive", fp.fixed(destructive));
}

/// Asks how bad `act` is and refuses from `deny_at` on.
fn judge(session: fp.Session, act: []const u8, deny_at: f64) fp.Error!fp.Routing {
    const answers = try session.decide(&.{
        fp.choice(fp.join(&.{ "What would running ", act, " do to this computer?" }), &.{
            .{ "nothing", "it only reads, or runs no command at all" },
            .{ "change", "it changes files or settings, and that can be undone" },
            .{ "destroy", "it deletes or overwrites what cannot be had back" },
        }),
        fp.boolean(fp.join(&.{ "Could running ", act, " lose data for good?" })),
    });
    const harm = answers[0].verdict.value.choice;
    const destroy = harm.probabilities.slice()[2];
    const lost = answers[1].yes();
    const harmless = std.mem.eql(u8, harm.choice.slice(), "nothing");
    const routing = if (destroy >= deny_at or (lost >= deny_at and !harmless)) refuse() else fp.next("shell-ok");
    return routing.label("destroy", fp.fixed(destroy)).label("lost", fp.fixed(lost));
}

fn destroying() fp.Routing {
    return fp.reject(403, "shell-risk", "The command destroys data; ask a person.");
}

fn refuse() fp.Routing {
    return fp.reject(403, "shell-risk", "This could destroy data; ask a person.");
}
