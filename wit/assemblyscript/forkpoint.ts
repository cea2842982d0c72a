// Helpers for policies in AssemblyScript. What the values mean is the contract's to say: wit/policy.wit.
//
//   import { Request, Routing, Session } from "forkpoint";
//   export { cabi_realloc } from "forkpoint";
//   export function route(at: usize): usize { return decideRoute(new Request(at), Session.of(at)).lower(); }
//
// The numbers below are offsets of the contract's types in the canonical ABI of 32-bit memory, by hand: AssemblyScript
// has no generator. Nothing is freed, as an instance serves one request, so what was lowered stays where it is.

@external("forkpoint:policy/engine@0.1.0", "decide")
declare function engineDecide(session: i32, questions: usize, count: i32, out: usize): void;
@external("forkpoint:policy/host@0.1.0", "config")
declare function hostConfig(key: usize, length: i32, out: usize): void;
@external("forkpoint:policy/host@0.1.0", "log")
declare function hostLog(level: i32, message: usize, length: i32): void;

/** What the host lowers its values with. */
export function cabi_realloc(old: usize, oldSize: usize, align: usize, size: usize): usize {
  const at = heap.alloc(size);
  if (oldSize > 0) memory.copy(at, old, min(oldSize, size));
  return at;
}

/** Zeroed memory. */
function room(size: usize): usize {
  const at = heap.alloc(size);
  memory.fill(at, 0, size);
  return at;
}

function lift(at: usize): string {
  return String.UTF8.decodeUnsafe(load<usize>(at), load<i32>(at, 4));
}

function lower(text: string, at: usize): void {
  const bytes = String.UTF8.encode(text);
  store<usize>(at, changetype<usize>(bytes));
  store<i32>(at, bytes.byteLength, 4);
}

function lowerOption(text: string | null, at: usize): void {
  store<u8>(at, text === null ? 0 : 1);
  if (text !== null) lower(text, at + 4);
}

/** What an assistant turn calls. */
export class ToolCall {
  constructor(private at: usize) {}
  get id(): string { return lift(this.at); }
  get name(): string { return lift(this.at + 8); }
  get arguments(): string { return lift(this.at + 16); }
}

/** One turn of a conversation. */
export class Message {
  constructor(private at: usize) {}
  get role(): Role { return <Role>load<u8>(this.at); }
  get content(): string { return lift(this.at + 4); }
  get toolCalls(): ToolCall[] {
    const calls: ToolCall[] = [];
    const first = load<usize>(this.at, 12);
    for (let i: usize = 0; i < load<usize>(this.at, 16); i++) calls.push(new ToolCall(first + 24 * i));
    return calls;
  }
  get toolCallId(): string | null { return load<u8>(this.at, 20) ? lift(this.at + 24) : null; }
}

export enum Role { System, User, Assistant, Tool }

/** What the client asked for. */
export class Request {
  constructor(private at: usize) {}
  get id(): string { return lift(this.at); }
  get model(): string { return lift(this.at + 8); }
  get messages(): Message[] {
    const turns: Message[] = [];
    const first = load<usize>(this.at, 16);
    for (let i: usize = 0; i < load<usize>(this.at, 20); i++) turns.push(new Message(first + 32 * i));
    return turns;
  }

  /** The text of the user's last turn, or "". */
  get lastUser(): string {
    const turns = this.messages;
    for (let i = turns.length - 1; i >= 0; i--) if (turns[i].role == Role.User) return turns[i].content;
    return "";
  }

  /** The calls that the model proposed last and that no tool has answered yet. */
  get pendingCalls(): ToolCall[] {
    const turns = this.messages;
    const pending: ToolCall[] = [];
    let from = turns.length - 1;
    while (from >= 0 && turns[from].toolCalls.length == 0) from--;
    if (from < 0) return pending;
    const answered: string[] = [];
    for (let i = from; i < turns.length; i++) {
      const id = turns[i].toolCallId;
      if (id !== null) answered.push(id);
    }
    const calls = turns[from].toolCalls;
    for (let i = 0; i < calls.length; i++) if (!answered.includes(calls[i].id)) pending.push(calls[i]);
    return pending;
  }

  /** The first value of a header, whose name is in lower case. */
  header(name: string): string | null {
    const first = load<usize>(this.at, 80);
    for (let i: usize = 0; i < load<usize>(this.at, 84); i++) {
      if (lift(first + 16 * i) == name) return lift(first + 16 * i + 8);
    }
    return null;
  }
}

enum Kind { Choice, Boolean, Score }

/** What is asked. */
export class Question {
  private probe: string | null = null;
  constructor(private kind: Kind, private instructions: string, private names: string[], private means: string[]) {}

  /** Has the question answered by the probe of this name, which costs no tokens. */
  probed(name: string): Question {
    this.probe = name;
    return this;
  }

  /** Writes it as the contract's record. */
  lower(at: usize): void {
    lower(this.instructions, at);
    store<u8>(at, <u8>this.kind, 8);
    if (this.kind != Kind.Boolean) {
      const size: usize = this.kind == Kind.Choice ? 20 : 8;
      const list = room(size * this.names.length);
      for (let i = 0; i < this.names.length; i++) {
        lower(this.names[i], list + size * i);
        if (this.kind == Kind.Choice) lowerOption(this.means.length > i ? this.means[i] : null, list + size * i + 8);
      }
      store<usize>(at, list, 12);
      store<i32>(at, this.names.length, 16);
    }
    lowerOption(this.probe, at + 36);
  }
}

/** A yes-or-no question. */
export function boolean(instructions: string): Question {
  return new Question(Kind.Boolean, instructions, [], []);
}

/** One of 1 to 26 options; `means`, which may be empty, says what each means. */
export function choice(instructions: string, options: string[], means: string[]): Question {
  return new Question(Kind.Choice, instructions, options, means);
}

/** A place on a scale of 2 to 10 levels, lowest first. */
export function score(instructions: string, levels: string[]): Question {
  return new Question(Kind.Score, instructions, levels, []);
}

/** What a question got: read what it asked for. */
export class Answer {
  constructor(private at: usize) {}
  /** The probability of yes. */
  get yes(): f64 { return load<f64>(this.at, 8); }
  /** The likeliest option. */
  get choice(): string { return lift(this.at + 8); }
  /** The expected level, from 0. */
  get level(): f64 { return load<f64>(this.at, 8); }
  /** Of an option or a level, by its place in the question. */
  probability(index: i32): f64 { return load<f64>(load<usize>(this.at, 16) + 8 * <usize>index); }
  /** Of a choice or a score. */
  get confidence(): f64 { return load<f64>(this.at, 24); }
  /** Low means unsure, whatever the confidence says. */
  get mass(): f64 { return load<f64>(this.at, 32); }
  get fromProbe(): bool { return load<u8>(this.at, 40) == 1; }
}

/** Why the last call gave nothing. */
export let failure: string = "";

/** The request's session. */
export class Session {
  constructor(private handle: i32) {}

  /** That of `route`'s arguments. */
  static of(at: usize): Session {
    return new Session(load<i32>(at, 88));
  }

  /** Answers questions in one engine step; null when the engine does not serve them, and `failure` says why. */
  decide(questions: Question[]): Answer[] | null {
    const list = room(48 * questions.length);
    for (let i = 0; i < questions.length; i++) questions[i].lower(list + 48 * i);
    const out = room(16);
    engineDecide(this.handle, list, questions.length, out);
    if (load<u8>(out)) {
      const kinds = ["invalid", "full", "budget", "denied", "unavailable"];
      failure = kinds[load<u8>(out, 4)] + ": " + lift(out + 8);
      return null;
    }
    const answers: Answer[] = [];
    for (let i = 0; i < questions.length; i++) answers.push(new Answer(load<usize>(out, 4) + 48 * i));
    return answers;
  }
}

/** A plan and why. */
export class Routing {
  // The contract's result: an error, or at 8 the routing, with its plan's tag at 8 and value at 16.
  private out: usize = room(120);
  private names: string[] = [];
  private values: string[] = [];

  static plan(tag: u8, reason: string): Routing {
    const routing = new Routing();
    store<u8>(routing.out, tag, 8);
    lower(reason, routing.out + 104);
    return routing;
  }

  /** Adds a name and value to the journal. */
  label(name: string, value: string): Routing {
    this.names.push(name);
    this.values.push(value);
    return this;
  }

  /** Fails the policy, which takes its fallback. */
  static error(reason: string): Routing {
    const routing = new Routing();
    store<u8>(routing.out, 1);
    lower(reason, routing.out + 8);
    return routing;
  }

  /** Replies from the session's own model, with what the client asked for. */
  static generate(reason: string): Routing { return Routing.plan(0, reason); }

  /** Sends the request to an upstream that the operator named; without a model it has its own rule. */
  static forward(upstream: string, model: string | null, reason: string): Routing {
    const routing = Routing.plan(1, reason);
    lower(upstream, routing.out + 16);
    lowerOption(model, routing.out + 24);
    return routing;
  }

  /** Answers with this text; no model runs. */
  static reply(text: string, reason: string): Routing {
    const routing = Routing.plan(2, reason);
    lower(text, routing.out + 16);
    return routing;
  }

  /** Refuses, with an HTTP status of 400 to 599, a code for programs and a sentence for people. */
  static reject(status: u16, code: string, message: string): Routing {
    const routing = Routing.plan(3, code);
    store<u16>(routing.out, status, 16);
    lower(code, routing.out + 20);
    lower(message, routing.out + 28);
    return routing;
  }

  /** Has no opinion: the next policy of the chain is asked. */
  static next(reason: string): Routing { return Routing.plan(4, reason); }

  /** What `route` returns. */
  lower(): usize {
    if (load<u8>(this.out) == 0) {
      const list = room(16 * this.names.length);
      for (let i = 0; i < this.names.length; i++) {
        lower(this.names[i], list + 16 * i);
        lower(this.values[i], list + 16 * i + 8);
      }
      store<usize>(this.out, list, 112);
      store<i32>(this.out, this.names.length, 116);
    }
    return this.out;
  }
}

/** A value of the policy's configuration, or null. */
export function config(key: string): string | null {
  const name = String.UTF8.encode(key);
  const out = room(12);
  hostConfig(changetype<usize>(name), name.byteLength, out);
  return load<u8>(out) ? lift(out + 4) : null;
}

/** A value of the policy's configuration as a number, or `otherwise`. NaN for what is none, and `failure` says so. */
export function number(key: string, otherwise: f64): f64 {
  const value = config(key);
  if (value === null) return otherwise;
  // parseFloat reads as far as it can, and no further: "0.9.1" would be 0.9.
  const text = value.trim();
  if (isDecimal(text)) return parseFloat(text);
  failure = "config " + key + " = \"" + value + "\": not a number";
  return NaN;
}

/** The same from `least` to `most`: NaN for another too, as a threshold beyond them would hold for nothing. */
export function numberWithin(key: string, otherwise: f64, least: f64, most: f64): f64 {
  const value = number(key, otherwise);
  if (isNaN(value) || (value >= least && value <= most)) return value;
  const range = least.toString() + " and " + most.toString();
  failure = "config " + key + " = " + value.toString() + ": must lie between " + range;
  return NaN;
}

/** Whether the whole text is a decimal number: a sign, digits with at most one point, an exponent. */
function isDecimal(text: string): bool {
  let at = sign(text, 0);
  const whole = digits(text, at);
  let count = whole - at;
  at = whole;
  if (at < text.length && text.charAt(at) == ".") {
    const end = digits(text, ++at);
    count += end - at;
    at = end;
  }
  if (count == 0) return false;
  if (at < text.length && (text.charAt(at) == "e" || text.charAt(at) == "E")) {
    at = sign(text, at + 1);
    const end = digits(text, at);
    if (end == at) return false;
    at = end;
  }
  return at == text.length;
}

function sign(text: string, at: i32): i32 {
  return at < text.length && (text.charAt(at) == "+" || text.charAt(at) == "-") ? at + 1 : at;
}

function digits(text: string, at: i32): i32 {
  while (at < text.length && text.charCodeAt(at) >= 48 && text.charCodeAt(at) <= 57) at++;
  return at;
}

/** A number with two decimals. */
export function fixed(value: f64): string {
  const hundredths = <i64>nearest(value * 100);
  const rest = hundredths % 100;
  return (hundredths / 100).toString() + (rest < 10 ? ".0" : ".") + rest.toString();
}

/** Writes a line to the server's log. */
export function log(message: string): void {
  const bytes = String.UTF8.encode(message);
  hostLog(1, changetype<usize>(bytes), bytes.byteLength);
}
