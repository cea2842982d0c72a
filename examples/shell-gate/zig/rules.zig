//! What a command's text says by itself. The lists are those of ../rust/src/rules.rs.

const std = @import("std");
const fp = @import("forkpoint");

const spaces = " \t\n\r\x0b\x0c";

/// Whether `name` is in `list`, names with commas between.
pub fn listed(list: []const u8, name: []const u8) bool {
    var names = std.mem.splitScalar(u8, list, ',');
    while (names.next()) |one| {
        if (std.mem.eql(u8, std.mem.trim(u8, one, spaces), name)) return true;
    }
    return false;
}

/// Whether the text holds a command that destroys: spaces counted once, letters in any case, and backslashes left out,
/// since JSON and shells both let them stand before letters that need none.
pub fn destroys(text: []const u8) bool {
    const parts = [_][]const u8{
        "rm -rf /", "rm -fr /", "rm -rf ~", "rm -rf *", "--no-preserve-root", "mkfs",
        "wipefs",   "of=/dev/", "> /dev/sd", ":(){",    "drop database",      "shred ",
    };
    const room = fp.create(u8, text.len);
    var length: usize = 0;
    for (text) |c| {
        if (c == '\\') continue;
        const space = std.mem.indexOfScalar(u8, spaces, c) != null;
        if (space and (length == 0 or room[length - 1] == ' ')) continue;
        room[length] = if (space) ' ' else std.ascii.toLower(c);
        length += 1;
    }
    const plain = std.mem.trim(u8, room[0..length], " ");
    for (parts) |part| {
        if (std.mem.indexOf(u8, plain, part) != null) return true;
    }
    return false;
}

/// Whether a short text orders what destroys. A long one may quote it, in a log or a file, and one that asks about it
/// does no harm: both are left to the questions.
pub fn ordersDestruction(text: []const u8) bool {
    const asks = [_][]const u8{ "explain", "what", "why", "how", "describe", "tell me" };
    if (text.len > 200 or !destroys(text)) return false;
    const start = std.mem.trim(u8, text, spaces);
    for (asks) |word| {
        if (std.ascii.startsWithIgnoreCase(start, word)) return false;
    }
    return true;
}

/// Whether a tool call's arguments, {"command": "…"} and nothing else, hold one command that only reads.
pub fn onlyReads(arguments: []const u8) bool {
    const reads = [_][]const u8{ "ls", "cat", "pwd", "head", "tail", "wc", "grep", "stat", "whoami", "git status" };
    const inside = between(std.mem.trim(u8, arguments, spaces), '{', '}') orelse return false;
    const colon = std.mem.indexOfScalar(u8, inside, ':') orelse return false;
    const name = std.mem.trim(u8, inside[0..colon], spaces);
    if (!std.mem.eql(u8, name, "\"command\"") and !std.mem.eql(u8, name, "\"cmd\"")) return false;
    const quoted = between(std.mem.trim(u8, inside[colon + 1 ..], spaces), '"', '"') orelse return false;
    // A quote inside would end the string early; the other signs chain, redirect or substitute.
    if (std.mem.indexOfAny(u8, quoted, "\";|&><`$\n\\") != null) return false;
    const command = std.mem.trim(u8, quoted, spaces);
    for (reads) |known| {
        if (!std.mem.startsWith(u8, command, known)) continue;
        if (command.len == known.len or command[known.len] == ' ') return true;
    }
    return false;
}

/// The text between two signs that stand at its ends.
fn between(text: []const u8, first: u8, last: u8) ?[]const u8 {
    if (text.len < 2 or text[0] != first or text[text.len - 1] != last) return null;
    return text[1 .. text.len - 1];
}
