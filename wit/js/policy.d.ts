// What wit/js/policy.js and the contract look like to TypeScript. What the values mean is the contract's to say:
// wit/policy.wit.
declare module "forkpoint-policy" {
  export type Role = "system" | "user" | "assistant" | "tool";
  export interface ToolCall { id: string; name: string; arguments: string }
  export interface Message { role: Role; content: string; toolCalls: ToolCall[]; toolCallId?: string | null }
  export interface Tool { name: string; description?: string | null; parameters: string }
  export interface Sampling {
    temperature?: number | null;
    topP?: number | null;
    maxTokens?: number | null;
    seed?: bigint | null;
    stop: string[];
  }
  export interface Request {
    id: string;
    model: string;
    messages: Message[];
    tools: Tool[];
    sampling: Sampling;
    headers: [string, string][];
  }

  /** A place in the KV cache; what fails throws. */
  export interface Session {
    fork(): Session;
    append(messages: Message[]): number;
    usage(): { tokens: number; reused: number; computed: number };
  }

  export interface ChoiceOption { name: string; description?: string | null }
  export type Criteria =
    | { tag: "choice"; val: ChoiceOption[] }
    | { tag: "boolean"; val: { yes?: string | null; no?: string | null } }
    | { tag: "score"; val: string[] };
  export type Question<C extends Criteria = Criteria> = { instructions: string; criteria: C; probe?: string | null };

  /** Common to all answers. Low `mass` means unsure, whatever `confidence` says. */
  export interface Answered { confidence: number; mass: number; rung: "labels" | "probe" }
  export interface BooleanAnswer extends Answered { yes: number }
  export interface ChoiceAnswer extends Answered { choice: string; probabilities: number[] }
  export interface ScoreAnswer extends Answered { level: number; probabilities: number[] }
  export type AnswerTo<Q> = Q extends { criteria: { tag: "boolean" } } ? BooleanAnswer
    : Q extends { criteria: { tag: "choice" } } ? ChoiceAnswer
    : Q extends { criteria: { tag: "score" } } ? ScoreAnswer
    : never;

  export function boolean(instructions: string, sides?: { yes?: string; no?: string }):
    Question<Extract<Criteria, { tag: "boolean" }>>;
  export function choice(instructions: string, options: (string | ChoiceOption)[]):
    Question<Extract<Criteria, { tag: "choice" }>>;
  export function score(instructions: string, levels: string[]): Question<Extract<Criteria, { tag: "score" }>>;
  export function probed<Q extends Question>(probe: string, question: Q): Q;
  export function decide<const Q extends readonly Question[]>(session: Session, questions: Q):
    { -readonly [I in keyof Q]: AnswerTo<Q[I]> };
  export function draft(session: Session, sampling?: Partial<Sampling>):
    { text: string; tokens: number; finishReason: string };

  export function lastUser(request: Request): string;
  export function pendingCalls(request: Request): ToolCall[];
  export function log(level: "debug" | "info" | "warn" | "error", message: string): void;
  export function config(key: string): string | undefined;
  export function config(key: string, otherwise: string): string;
  export function config(key: string, otherwise: number): number;
  export function configWithin(key: string, otherwise: number, least: number, most: number): number;

  /** What was thrown, as text. */
  export function reason(error: unknown): string;

  export type Labels = Record<string, string | number>;
  export interface Routing {
    plan: { tag: "generate" | "forward" | "reply" | "reject" | "next"; val?: unknown };
    reason: string;
    labels: [string, string][];
  }
  export interface How {
    on?: Session;
    model?: string;
    append?: Message[];
    tools?: string[];
    sampling?: Partial<Sampling>;
  }
  export function generate(reason: string, labels?: Labels, how?: How): Routing;
  export function system(content: string): Message;
  export function forward(upstream: string, reason: string, labels?: Labels, model?: string): Routing;
  export function reply(text: string, reason?: string, labels?: Labels): Routing;
  export function reject(status: number, code: string, message: string, labels?: Labels): Routing;
  export function next(reason?: string, labels?: Labels): Routing;
}
