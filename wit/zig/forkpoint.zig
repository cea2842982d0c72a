//! Helpers for policies in Zig. What the values mean is the contract's to say: wit/policy.wit.
//!
//!     const fp = @import("forkpoint");
//!     comptime { fp.policy(route); }
//!     fn route(request: *const fp.Request, session: fp.Session) fp.Error!fp.Routing {
//!         _ = .{ request, session };
//!         return fp.next("no-opinion");
//!     }
//!
//! The types below are the contract's in the canonical ABI of 32-bit memory, by hand: Zig has no generator. Nothing is
//! freed, as an instance serves one request.

const std = @import("std");

/// What a policy fails with; `fail` keeps the reason.
pub const Error = error{Policy};

/// A list of the contract, and text, which is a list of bytes.
pub fn List(comptime T: type) type {
    return extern struct {
        ptr: [*]const T,
        len: usize,

        pub fn of(items: []const T) @This() {
            // What is empty may lie anywhere that the memory has.
            return if (items.len == 0) none else .{ .ptr = items.ptr, .len = items.len };
        }

        pub fn slice(self: @This()) []const T {
            return if (self.len == 0) &.{} else self.ptr[0..self.len];
        }

        pub const none: @This() = .{ .ptr = @ptrFromInt(8), .len = 0 };
    };
}

pub const Text = List(u8);

/// A value or nothing.
pub fn Optional(comptime T: type) type {
    return extern struct {
        is_some: u8,
        value: T,

        pub const none: @This() = .{ .is_some = 0, .value = std.mem.zeroes(T) };

        pub fn some(value: T) @This() {
            return .{ .is_some = 1, .value = value };
        }

        pub fn get(self: @This()) ?T {
            return if (self.is_some == 0) null else self.value;
        }
    };
}

pub const Role = enum(u8) { system, user, assistant, tool };
pub const ToolCall = extern struct { id: Text, name: Text, arguments: Text };
pub const Message = extern struct { role: Role, content: Text, tool_calls: List(ToolCall), tool_call_id: OptionalText };
pub const Tool = extern struct { name: Text, description: OptionalText, parameters: Text };
pub const Header = extern struct { name: Text, value: Text };

/// `Optional(Text)`, whose empty value must point nowhere in particular.
pub const OptionalText = extern struct {
    is_some: u8 = 0,
    value: Text = Text.none,

    pub fn some(value: []const u8) OptionalText {
        return .{ .is_some = 1, .value = Text.of(value) };
    }

    pub fn get(self: OptionalText) ?[]const u8 {
        return if (self.is_some == 0) null else self.value.slice();
    }
};

pub const Sampling = extern struct {
    temperature: Optional(f32) = .none,
    top_p: Optional(f32) = .none,
    max_tokens: Optional(u32) = .none,
    seed: Optional(u64) = .none,
    stop: List(Text) = List(Text).none,
};

/// What the client asked for.
pub const Request = extern struct {
    id: Text,
    model: Text,
    messages: List(Message),
    tools: List(Tool),
    sampling: Sampling,
    headers: List(Header),

    /// The text of the user's last turn, or "".
    pub fn lastUser(self: *const Request) []const u8 {
        const turns = self.messages.slice();
        var i = turns.len;
        while (i > 0) {
            i -= 1;
            if (turns[i].role == .user) return turns[i].content.slice();
        }
        return "";
    }

    /// The calls that the model proposed last and that no tool has answered yet.
    pub fn pendingCalls(self: *const Request) []const ToolCall {
        const turns = self.messages.slice();
        var end = turns.len;
        while (end > 0 and turns[end - 1].tool_calls.len == 0) end -= 1;
        if (end == 0) return &.{};
        const calls = turns[end - 1].tool_calls.slice();
        const pending = create(ToolCall, calls.len);
        var count: usize = 0;
        for (calls) |call| {
            for (turns[end - 1 ..]) |turn| {
                const id = turn.tool_call_id.get() orelse continue;
                if (std.mem.eql(u8, id, call.id.slice())) break;
            } else {
                pending[count] = call;
                count += 1;
            }
        }
        return pending[0..count];
    }
};

const ChoiceOption = extern struct { name: Text, description: OptionalText };
const BooleanSides = extern struct { yes: OptionalText, no: OptionalText };
const Criteria = extern struct {
    tag: enum(u8) { choice, boolean, score },
    value: extern union { choice: List(ChoiceOption), boolean: BooleanSides, score: List(Text) },
};

/// What is asked.
pub const Question = extern struct {
    instructions: Text,
    criteria: Criteria,
    probe: OptionalText = .{},

    /// Has the question answered by the probe of this name, which costs no tokens.
    pub fn probed(self: Question, name: []const u8) Question {
        var out = self;
        out.probe = OptionalText.some(name);
        return out;
    }
};

/// A yes-or-no question.
pub fn boolean(instructions: []const u8) Question {
    const criteria: Criteria = .{ .tag = .boolean, .value = .{ .boolean = .{ .yes = .{}, .no = .{} } } };
    return .{ .instructions = Text.of(instructions), .criteria = criteria };
}

/// One of 1 to 26 options, each its name and what it means.
pub fn choice(instructions: []const u8, options: []const [2][]const u8) Question {
    const list = create(ChoiceOption, options.len);
    for (options, list) |option, *out| {
        out.* = .{ .name = Text.of(option[0]), .description = OptionalText.some(option[1]) };
    }
    const criteria: Criteria = .{ .tag = .choice, .value = .{ .choice = List(ChoiceOption).of(list) } };
    return .{ .instructions = Text.of(instructions), .criteria = criteria };
}

/// A place on a scale of 2 to 10 levels, lowest first.
pub fn score(instructions: []const u8, levels: []const []const u8) Question {
    const list = create(Text, levels.len);
    for (levels, list) |level, *out| out.* = Text.of(level);
    const criteria: Criteria = .{ .tag = .score, .value = .{ .score = List(Text).of(list) } };
    return .{ .instructions = Text.of(instructions), .criteria = criteria };
}

pub const ChoiceAnswer = extern struct { choice: Text, probabilities: List(f64), confidence: f64 };
pub const ScoreAnswer = extern struct { score: f64, probabilities: List(f64), confidence: f64 };
pub const Rung = enum(u8) { labels, probe };

/// What a question got: read the verdict that it asked for.
pub const Answer = extern struct {
    verdict: extern struct {
        tag: enum(u8) { choice, boolean, score },
        value: extern union { choice: ChoiceAnswer, boolean: f64, score: ScoreAnswer },
    },
    /// Low means unsure, whatever the confidence says.
    mass: f64,
    rung: Rung,

    /// The probability of yes.
    pub fn yes(self: Answer) f64 {
        return self.verdict.value.boolean;
    }
};

const Failure = extern struct { kind: u8, text: Text };

/// The request's session.
pub const Session = extern struct {
    handle: i32,

    /// Answers questions in one engine step.
    pub fn decide(self: Session, questions: []const Question) Error![]const Answer {
        const Returned = extern struct { is_err: u8, value: extern union { answers: List(Answer), failure: Failure } };
        var returned: Returned = undefined;
        imports.decide(self.handle, questions.ptr, questions.len, &returned);
        if (returned.is_err == 0) return returned.value.answers.slice();
        const kinds = [_][]const u8{ "invalid", "full", "budget", "denied", "unavailable" };
        return fail(join(&.{ kinds[returned.value.failure.kind], ": ", returned.value.failure.text.slice() }));
    }
};

const imports = struct {
    extern "forkpoint:policy/engine@0.1.0" fn decide(on: i32, questions: [*]const Question, count: usize, out: *anyopaque) void;
    extern "forkpoint:policy/host@0.1.0" fn config(key: [*]const u8, length: usize, out: *OptionalText) void;
    extern "forkpoint:policy/host@0.1.0" fn log(level: i32, message: [*]const u8, length: usize) void;
};

pub const Generation = extern struct {
    on: Optional(i32) = .none,
    model: OptionalText = .{},
    append: List(Message) = List(Message).none,
    tools: extern struct { is_some: u8 = 0, names: List(Text) = List(Text).none } = .{},
    sampling: Sampling = .{},
};
const Forward = extern struct { upstream: Text, model: OptionalText };
const Rejection = extern struct { status: u16, code: Text, message: Text };
const Plan = extern struct {
    tag: enum(u8) { generate, forward, reply, reject, next },
    value: extern union { generate: Generation, forward: Forward, reply: Text, reject: Rejection },
};

/// A plan and why.
pub const Routing = extern struct {
    plan: Plan,
    reason: Text,
    labels: List(Header),

    /// Adds a name and value to the journal.
    pub fn label(self: Routing, name: []const u8, value: []const u8) Routing {
        const old = self.labels.slice();
        const list = create(Header, old.len + 1);
        @memcpy(list[0..old.len], old);
        list[old.len] = .{ .name = Text.of(name), .value = Text.of(value) };
        var out = self;
        out.labels = List(Header).of(list);
        return out;
    }
};

fn routing(plan: Plan, reason: []const u8) Routing {
    return .{ .plan = plan, .reason = Text.of(reason), .labels = List(Header).none };
}

/// Replies from a model in this process; `.{}` is the session's own, with what the client asked for.
pub fn generate(how: Generation, reason: []const u8) Routing {
    return routing(.{ .tag = .generate, .value = .{ .generate = how } }, reason);
}

/// Sends the request to an upstream that the operator named; without a model it has its own rule.
pub fn forward(upstream: []const u8, model: ?[]const u8, reason: []const u8) Routing {
    const asked: OptionalText = if (model) |name| OptionalText.some(name) else .{};
    const plan: Forward = .{ .upstream = Text.of(upstream), .model = asked };
    return routing(.{ .tag = .forward, .value = .{ .forward = plan } }, reason);
}

/// Answers with this text; no model runs.
pub fn reply(words: []const u8, reason: []const u8) Routing {
    return routing(.{ .tag = .reply, .value = .{ .reply = Text.of(words) } }, reason);
}

/// Refuses, with an HTTP status of 400 to 599, a code for programs and a sentence for people.
pub fn reject(status: u16, code: []const u8, message: []const u8) Routing {
    const rejection: Rejection = .{ .status = status, .code = Text.of(code), .message = Text.of(message) };
    return routing(.{ .tag = .reject, .value = .{ .reject = rejection } }, code);
}

/// Has no opinion: the next policy of the chain is asked.
pub fn next(reason: []const u8) Routing {
    return routing(.{ .tag = .next, .value = undefined }, reason);
}

/// A value of the policy's configuration, or `otherwise`.
pub fn config(key: []const u8, otherwise: []const u8) []const u8 {
    return configured(key) orelse otherwise;
}

fn configured(key: []const u8) ?[]const u8 {
    var out: OptionalText = .{};
    imports.config(key.ptr, key.len, &out);
    return out.get();
}

/// The same as a number. A value that is none is an error.
pub fn configNumber(key: []const u8, otherwise: f64) Error!f64 {
    const value = configured(key) orelse return otherwise;
    return std.fmt.parseFloat(f64, std.mem.trim(u8, value, " ")) catch
        fail(join(&.{ "config ", key, " = \"", value, "\": not a number" }));
}

/// The same from `least` to `most`. A threshold beyond them, or a NaN, would hold for nothing: it is an error.
pub fn configWithin(key: []const u8, otherwise: f64, comptime least: f64, comptime most: f64) Error!f64 {
    const number = try configNumber(key, otherwise);
    if (number >= least and number <= most) return number;
    const range = std.fmt.comptimePrint(": must lie between {d} and {d}", .{ least, most });
    return fail(join(&.{ "config ", key, " = ", configured(key) orelse "", range }));
}

/// Writes a line to the server's log.
pub fn log(message: []const u8) void {
    imports.log(1, message.ptr, message.len);
}

var reason_of_failure: []const u8 = "";

/// The policy's error with its reason, which takes the policy's fallback.
pub fn fail(reason: []const u8) Error {
    reason_of_failure = reason;
    return error.Policy;
}

/// Exports a function as the component's `route`.
pub fn policy(comptime route: fn (*const Request, Session) Error!Routing) void {
    const Returned = extern struct { is_err: u8, value: extern union { routing: Routing, reason: Text } };
    const Arguments = extern struct { request: Request, session: Session };
    const exported = struct {
        fn call(arguments: *const Arguments) callconv(.c) *const Returned {
            const out = &create(Returned, 1)[0];
            if (route(&arguments.request, arguments.session)) |planned| {
                out.* = .{ .is_err = 0, .value = .{ .routing = planned } };
            } else |_| {
                out.* = .{ .is_err = 1, .value = .{ .reason = Text.of(reason_of_failure) } };
            }
            return out;
        }
    };
    // Sizes that the canonical ABI gives: a mistyped field would shift all behind it.
    if (@sizeOf(Arguments) != 96 or @sizeOf(Question) != 48 or @sizeOf(Answer) != 48 or @sizeOf(Returned) != 120) {
        @compileError("the types are not laid out as the contract's");
    }
    @export(&exported.call, .{ .name = "route" });
    @export(&realloc, .{ .name = "cabi_realloc" });
}

/// Joins texts into a new one.
pub fn join(parts: []const []const u8) []const u8 {
    var length: usize = 0;
    for (parts) |part| length += part.len;
    const out = create(u8, length);
    var at: usize = 0;
    for (parts) |part| {
        @memcpy(out[at..][0..part.len], part);
        at += part.len;
    }
    return out;
}

/// A number with two decimals.
pub fn fixed(value: f64) []const u8 {
    const hundredths: u32 = @intFromFloat(@round(value * 100));
    const digits = create(u8, 16);
    return std.fmt.bufPrint(digits, "{d}.{d:0>2}", .{ hundredths / 100, hundredths % 100 }) catch "";
}

/// Room for `count` values, until the instance ends.
pub fn create(comptime T: type, count: usize) []T {
    const address = take(count * @sizeOf(T), @alignOf(T));
    return @as([*]T, @ptrFromInt(address))[0..count];
}

var heap_free: usize = 0;
var heap_end: usize = 0;

fn take(size: usize, alignment: usize) usize {
    const page = 64 * 1024;
    if (heap_end == 0) {
        heap_end = @wasmMemorySize(0) * page;
        heap_free = heap_end;
    }
    const at = std.mem.alignForward(usize, @max(heap_free, 8), alignment);
    if (at + size > heap_end) {
        const pages = (at + size - heap_end + page - 1) / page;
        if (@wasmMemoryGrow(0, pages) < 0) @trap();
        heap_end += pages * page;
    }
    heap_free = at + size;
    return at;
}

fn realloc(old: usize, old_size: usize, alignment: usize, size: usize) callconv(.c) usize {
    const at = take(size, alignment);
    const kept = @min(old_size, size);
    if (kept > 0) @memcpy(@as([*]u8, @ptrFromInt(at))[0..kept], @as([*]const u8, @ptrFromInt(old))[0..kept]);
    return at;
}
